"""torchtitan's state-dict adapters to and from Hugging Face format, on weights that are sharded in any way.

An adapter permutes, splits and stacks weights. torch has no rule for that on many placements; torchtitan's adapters of
models with experts know at most two mesh axes that cut the stack of experts, the outer one FSDP2's; and that of llama4
leaves weights that the writer refuses. Here they work on whole weights, one at a time, so that what comes out is that of
an unsharded model, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torchtitan.models.utils import MoEStateDictAdapter
from torchtitan.protocols import BaseStateDictAdapter

_TIED = "lm_head.weight"


@dataclass(frozen=True)
class _Part:
    """Weights that are converted together.

    Attributes:
        layouts: (mesh, placements) of each of torchtitan's weights, None where it is no DTensor.
        names: of the weights in Hugging Face format.
    """

    layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]] | None]
    names: list[str]


def is_extra_state(name: str) -> bool:
    """Whether this entry of a state dict is what a module has besides weights, which that format does not hold."""
    return name.endswith(_EXTRA_STATE_KEY_SUFFIX)


def _parts(adapter: BaseStateDictAdapter, names: Iterable[str]) -> list[list[str]]:
    """Names of weights, those together that an adapter makes one of."""
    parts: dict[str, list[str]] = {}
    for name in names:
        # torchtitan's llama4 has up and gate projections of experts in one weight.
        together = ".experts." in name and not isinstance(adapter, MoEStateDictAdapter)
        parts.setdefault(name.rpartition(".")[0] if together else name, []).append(name)
    return list(parts.values())


def _laid_out(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part of a tensor that all ranks have, in memory of its own; no communication.

    Of a tensor on the meta device: memory on the mesh's device with nothing in it.
    """
    local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    if local.is_meta:
        local = torch.empty(local.shape, dtype=local.dtype, device=mesh.device_type)
    else:
        local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def _spread(whole: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Rows over all ranks of a mesh where there are enough of them."""
    if mesh is None:
        return whole.contiguous()
    enough = whole.dim() > 0 and whole.shape[0] >= mesh.size()
    return _laid_out(whole, mesh, (Shard(0) if enough else Replicate(),) * mesh.ndim)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """As large as the whole of `tensor`; where that has no mesh, on its device."""
    device = "meta" if isinstance(tensor, DTensor) else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class GatheringAdapter(BaseStateDictAdapter):
    """An adapter of torchtitan that works on whole weights: one weight at a time is on every rank of its mesh.

    `to_hf` and `template` return DTensors with rows spread over each weight's mesh; `from_hf` takes such, and returns
    weights laid out as in the state dict that was last given to one of the two. All ranks of a mesh call all.

    Args:
        adapter: torchtitan's.
    """

    def __init__(self, adapter: BaseStateDictAdapter) -> None:
        self._adapter = adapter
        self._converted: list[_Part] = []
        self.fqn_to_index_mapping = adapter.fqn_to_index_mapping
        self.hf_assets_path = adapter.hf_assets_path

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """torchtitan's."""
        return self._adapter.get_hf_storage_reader(path, from_quantized)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See the class's docstring."""
        return self._convert(state_dict, _whole)

    def template(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Memory for what `to_hf` would return; no communication."""
        return self._convert(state_dict, _empty)

    def _convert(self, state_dict: dict[str, Any], whole: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        self._converted = []
        result: dict[str, Any] = {}
        for names in _parts(self._adapter, state_dict):
            layouts = {
                name: (value.device_mesh, value.placements) if isinstance(value := state_dict[name], DTensor) else None
                for name in names
            }
            mesh = next((layout[0] for layout in layouts.values() if layout is not None), None)
            converted = self._adapter.to_hf({name: whole(state_dict[name]) for name in names})
            result |= {name: _spread(value, mesh) for name, value in converted.items()}
            self._converted.append(_Part(layouts, list(converted)))
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """See the class's docstring."""
        result: dict[str, Any] = {}
        for part in self._converted:
            whole = {name: _whole(hf_state_dict[name]) for name in part.names}
            if whole and _TIED not in whole and not any("embed_tokens" in name for name in whole):
                # Adapters of models with tied embeddings look for these in whatever they are given.
                whole[_TIED] = torch.empty(0)
            for name, value in self._adapter.from_hf(whole).items() if whole else ():
                layout = part.layouts.get(name)
                if name in part.layouts:
                    result[name] = value if layout is None else _laid_out(value, *layout)
        return result


def check_names(adapter: BaseStateDictAdapter | None, model_parts: list[nn.Module], saves: bool) -> None:
    """Whether an adapter can convert all weights of this rank.

    Args:
        adapter: torchtitan's.
        model_parts: of this rank.
        saves: the files are written, not only read.

    Raises:
        ValueError: names the weights.
    """
    keys = "checkpoint.last_save_in_hf, checkpoint.initial_load_in_hf"
    if adapter is None:
        raise ValueError(f"{keys}: torchtitan has no adapter for this model; set them to false")
    states = (get_model_state_dict(part) for part in model_parts)
    weights = {name: value for state in states for name, value in state.items() if not is_extra_state(name)}
    found: set[str] = set()
    for names in _parts(adapter, weights):
        try:
            found |= adapter.to_hf({name: torch.empty(weights[name].shape, device="meta") for name in names}).keys()
        except KeyError as error:
            raise ValueError(
                f"{keys}: torchtitan's adapter does not know {', '.join(names)} (no entry for {error}); set them to false"
            ) from error
    if saves and adapter.fqn_to_index_mapping:
        unknown = sorted(found - adapter.fqn_to_index_mapping.keys())
        if unknown:
            raise ValueError(
                f"checkpoint.last_save_in_hf: model.safetensors.index.json in model.hf_assets_path ({adapter.hf_assets_path}) "
                f"names no file for {', '.join(unknown[:5])}{' and more' if unknown[5:] else ''}; it is of another model: "
                "name this model's folder, or one without such a file"
            )
