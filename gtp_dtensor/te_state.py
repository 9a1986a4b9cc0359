"""The ``_extra_state`` of TransformerEngine's modules: scales and histories of delayed scaling, without TE's pickle.

[Note: extra state]
    A CPU tensor of bytes: numbers of 64 bits (``_MAGIC``, format, quantizers and history length of the forward, the same of
    the backward), then float32: scales and history of the forward, scales and history of the backward. Empty for recipes
    without such state. All ranks have the same, so DCP writes it once.

    Its length is that of the recipe's histories: known when a module is made by ``quantized_model_init``, otherwise since
    its first step. ``CheckedLoadPlanner`` gives a state dict the length that the checkpoint has.
"""

from __future__ import annotations

import functools

import torch
import torch.nn as nn

from .members import STATE
from .te_modules import SHARDED, te_class

_MAGIC = int.from_bytes(b"GTP scal", "little")
_HEADER = 6
_FORMATS = ("E4M3", "E5M2", "HYBRID")  # TE's names
_WAYS = ("scaling_fwd", "scaling_bwd")


def _scalings(module: nn.Module) -> list | None:
    """TE's forward and backward states of delayed scaling; None: it has other ones, or none yet."""
    recipe = module.fp8_meta.get("recipe")
    if recipe is None or not recipe.delayed() or any(way not in module.fp8_meta for way in _WAYS):
        return None
    return [module.fp8_meta[way] for way in _WAYS]


def _packed(module: nn.Module, scalings: list) -> torch.Tensor:
    sizes = [size for scaling in scalings for size in reversed(scaling.amax_history.shape)]
    name = module.fp8_meta["recipe"].fp8_format.name
    header = torch.tensor([_MAGIC, _FORMATS.index(name), *sizes])
    values = [part for scaling in scalings for part in (scaling.scale, scaling.amax_history)]
    values = torch.cat([value.detach().float().flatten() for value in values]).cpu()
    return torch.cat([header.view(torch.uint8), values.view(torch.uint8)])


def _header(state: object) -> list[int] | None:
    """The numbers after ``_MAGIC``; None: it is not ours."""
    num_bytes = 8 * _HEADER
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.numel() < num_bytes:
        return None
    numbers = state[:num_bytes].cpu().clone().view(torch.int64).tolist()
    return numbers[1:] if numbers[0] == _MAGIC else None


def _unpack(module: nn.Module, header: list[int], state: torch.Tensor) -> None:
    index, *sizes = header
    shapes = [(sizes[0],), (sizes[1], sizes[0]), (sizes[2],), (sizes[3], sizes[2])]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    values = state[8 * _HEADER :]
    if index not in range(len(_FORMATS)) or min(sizes) < 1 or values.numel() != 4 * sum(lengths):
        raise ValueError(
            f"{_what(module)} has {state.numel()} bytes and says that it holds scales of "
            f"{sizes[0]} and {sizes[2]} tensors with histories of {sizes[1]} and {sizes[3]} steps: it is broken"
        )
    if "recipe" in module.fp8_meta and not module.fp8_meta["recipe"].delayed():
        return  # its recipe has no use for these
    scalings = _scalings(module) or _make_scalings(module, _FORMATS[index], sizes)
    if [scaling.scale.numel() for scaling in scalings] != sizes[::2]:
        raise ValueError(
            f"{_what(module)} has scales of {sizes[0]} and {sizes[2]} tensors, and the module "
            f"has {' and '.join(str(scaling.scale.numel()) for scaling in scalings)}: it is another module's"
        )
    values = values.cpu().clone().view(torch.float32).split(lengths)
    for scaling, scale, history, shape in zip(scalings, values[::2], values[1::2], shapes[1::2]):
        history, mine = history.view(shape), scaling.amax_history
        scaling.scale.copy_(scale)
        mine.zero_()  # as TE does where a recipe's history gets another length: cut, or filled up
        mine[: len(history)].copy_(history[: len(mine)])


def _what(module: nn.Module) -> str:
    weights = module.__dict__[STATE].weights.values() if STATE in module.__dict__ else ()
    names = [weight.fqn.rpartition(".")[0] for weight in weights]
    return f"the extra state of {names[0] if names else 'a'} {type(module).__name__}"


def _make_scalings(module: nn.Module, format_name: str, sizes: list[int]) -> list:
    """What a module that has not run yet would make in its first step with that recipe."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    module.fp8_meta["num_gemms"] = sizes[0] // 3  # input, weight, output
    recipe = DelayedScaling(amax_history_len=sizes[1], fp8_format=Format[format_name])
    module.fp8_meta["recipe"] = recipe
    module.init_fp8_meta_tensors(recipe)
    return _scalings(module)


@functools.lru_cache(maxsize=None)
def state_methods(base: type[nn.Module]) -> dict[str, object]:
    """``get_extra_state`` and ``set_extra_state`` of a class derived from TE's ``base``; empty where it has none like TE's
    modules."""
    is_module = te_class(base).__module__.startswith("transformer_engine.pytorch.module.")
    if not is_module or base.get_extra_state is nn.Module.get_extra_state:
        return {}

    def get_extra_state(self: nn.Module) -> torch.Tensor:
        """Scales and histories of delayed scaling, as bytes; see [Note: extra state]."""
        scalings = _scalings(self)
        return base.get_extra_state(self) if scalings is None else _packed(self, scalings)

    def set_extra_state(self: nn.Module, state: torch.Tensor) -> None:
        """Load what :meth:`get_extra_state` returned, also where histories have another length; TE's own pickles where TE
        does.

        Raises:
            ValueError: the state is broken, or of a module with other GEMMs.
        """
        header = _header(state)
        if header is None:
            base.set_extra_state(self, state)
        else:
            _unpack(self, header, state)
        if STATE in self.__dict__:
            for weight in self.__dict__[STATE].weights.values():
                weight.mark_changed()  # it was quantized with the scale of before

    return {method.__name__: method for method in (get_extra_state, set_extra_state)}


@functools.lru_cache(maxsize=None)
def plain_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of unsharded modules with the extra state of sharded ones."""
    return type(base.__name__, (base,), {SHARDED: True, "__module__": base.__module__, **state_methods(base)})
