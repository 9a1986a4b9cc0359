"""Which parameters a ``GTPStyle`` takes, and everything that it refuses, before anything is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .grad_hooks import has_hooks
from .layout import TPLayout, axis_name, tp_layout
from .members import STATE, state_members
from .steps import SUCCESSOR
from .te_modules import refuse as refuse_te
from .wire import WireFormat
from .wires import GROUPED_GEMMS, choose_wires, is_te, te_room

if TYPE_CHECKING:
    from .style import GTPStyle
    from .te import Replacements

# Wrappers that insert a segment of their own into parameter names.
_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# Hooks of torch's older utilities, which set a plain attribute before each forward.
_HOOKS_THAT_COMPUTE_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)
ModuleFilter = Callable[[str, nn.Module], bool] | Sequence[str]


def clean_fqn(name: str) -> str:
    """A parameter's name without the segments that checkpoint and compile wrappers insert."""
    for segment in _WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
    return name


class Plan:
    """Which parameters of a module tree are sharded, decided and checked before anything is changed."""

    def __init__(self, style: GTPStyle, root: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
        self.style = style
        self.root = root
        self.module = module
        self.mesh = mesh
        self.axis = f"mesh axis '{axis_name(mesh, 'gtp')}' of size {mesh.size()}"
        prefix = next((f"{name}." for name, below in root.named_modules() if below is module and name), "")
        # (module, its name, parameter name, the parameter's name below ``module``, its FQN, parameter); tied parameters
        # once for each owner
        self.entries: list[tuple[nn.Module, str, str, str, str, nn.Parameter]] = []
        self.modules = self._served_modules(style, module)
        self.te = te_parameters(self.modules, root, mesh)  # what TransformerEngine's modules get in place of theirs
        self.replaced = {} if self.te is None else self.te.replaced
        for owner_name, owner in self.modules.items():
            for name, param in self._parameters(owner).items():
                if param is not None:
                    below = clean_fqn(f"{owner_name}.{name}" if owner_name else name)
                    self.entries.append((owner, clean_fqn(owner_name), name, below, clean_fqn(prefix) + below, param))
        self.borrows = {m: names for m, names in _borrowed_children(module) if m in set(self.modules.values())}
        self.sharded = self._choose(style)
        self.tp: dict[int, TPLayout | None] = {}
        self.tp_mesh: DeviceMesh | None = None
        self.wires: dict[int, WireFormat] = {}
        self.small_for_wire: list[str] = []

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        return module._parameters if self.te is None else self.te.of(module)

    def replace_parameters(self) -> None:
        """Register what this plan is about, where that is not registered: the first change to the model."""
        if self.te is not None:
            self.te.register()

    def is_stack(self, param: nn.Parameter) -> bool:
        """Whether a sharded parameter is one matrix for each expert."""
        is_te_stack = self.te is not None and id(param) in self.te.stacks
        return is_te_stack or self.style.is_expert and param.dim() > 2

    @staticmethod
    def _served_modules(style: GTPStyle, root: nn.Module) -> dict[str, nn.Module]:
        """The modules below ``root``, itself included, that the style is for, by name: experts are not for a dense
        style that follows theirs, and other modules not for a style of experts."""
        modules = dict(root.named_modules())
        if not style.is_expert:
            return {name: module for name, module in modules.items() if not is_taken_by_experts(module)}
        if style.modules is None:
            return modules
        experts: set[nn.Module] = set()
        for name, module in modules.items():
            if _is_chosen(style.modules, clean_fqn(f"{name}.")[:-1], module):
                experts.update(module.modules())
        return {name: module for name, module in modules.items() if module in experts}

    def _choose(self, style: GTPStyle) -> set[int]:
        """ids of the parameters that are sharded. A tied parameter is, where any of its owners says so."""
        names = {entry[1] for entry in self.entries}
        if style.is_expert:  # whose patterns may name what contains the experts
            names = {clean_fqn(f"{name}.")[:-1] for name, _ in self.module.named_modules()}
        for option, patterns, names in (
            ("modules", () if callable(style.modules) else style.modules or (), names),
            ("exclude", style.exclude, {e[3] for e in self.entries}),
        ):
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise ValueError(
                        f"GTPStyle({option}=...): pattern '{pattern}' matches nothing; names here are such as "
                        f"{', '.join(sorted(names)[:5])}"
                    )
        sharded = set()
        for module, module_name, _, below, _, param in self.entries:
            if param.dim() < 2 or param.numel() < max(style.min_numel, 1) or not param.is_floating_point():
                continue
            if any(fnmatch.fnmatchcase(below, pattern) for pattern in style.exclude):
                continue
            if style.is_expert or style.modules is None or _is_chosen(style.modules, module_name, module):
                sharded.add(id(param))
        return sharded

    def check(self) -> None:
        """Everything that can be refused is refused here."""
        if not self.entries:
            kind = "experts with " if self.style.is_expert else ""
            raise ValueError(f"GTPStyle: {type(self.module).__name__} has no {kind}parameters to put on {self.axis}")
        for module, _, name, _, fqn, param in self.entries:
            what = f"{fqn} of shape {tuple(param.shape)}"
            self._check_module(module, what)
            if self.te is not None:
                self.te.check(param, what)
            olds = self.replaced.get(id(param), [param])
            if any(map(has_hooks, olds)):
                raise ValueError(
                    f"{what} has gradient hooks, and {self.axis} replaces the parameter: register them afterwards"
                )
            if any(old.grad is not None for old in olds):
                raise ValueError(f"{what} has a gradient: call zero_grad(set_to_none=True) before GTPStyle")
            self.tp[id(param)] = tp_layout(param, self.mesh, fqn)
            local = param._local_tensor if isinstance(param, DTensor) else param
            if type(local) not in (torch.Tensor, nn.Parameter):
                raise ValueError(
                    f"{what} on {self.axis} is a {type(local).__name__}, a kind of tensor not served yet: dequantize it before "
                    "GTPStyle (GTPConfig(wire_format=...) quantizes what travels)"
                )
            if local.device.type not in (self.mesh.device_type, "meta"):
                raise ValueError(
                    f"{what} is on {local.device} and {self.axis} on {self.mesh.device_type}: move the model there before "
                    "GTPStyle, or build it on the meta device"
                )
            if id(param) in self.sharded:
                self._check_sharded(module, what, local)
            self._check_tie(param)
        self._find_tp_mesh()
        self._check_experts()
        self.wires, self.small_for_wire = choose_wires(self)

    def _check_experts(self) -> None:
        """What expert parallelism and forwards of one's own need."""
        classes = {type(module) for module in self.modules.values()}
        for cls in self.style.forwards:
            if cls not in classes:
                names = ", ".join(sorted({one.__name__ for one in classes}))
                raise ValueError(
                    f"GTPStyle(forwards=...): no module here is exactly a {cls.__name__}; there are {names}"
                )
        for module, _, _, _, fqn, param in self.entries:
            reads_quantized = GROUPED_GEMMS in module.__dict__ and id(param) in self.sharded
            if reads_quantized and type(module) not in self.style.forwards:
                cls = type(module).__name__
                raise ValueError(
                    f"{fqn} of shape {tuple(param.shape)}: grouped GEMMs of its {cls} read quantized numbers, so GTPStyle needs "
                    f"a forward that calls grouped_linear: GTPStyle(forwards={{{cls}: ...}})"
                )
        if not self.style.is_expert or self.tp_mesh is None:
            return
        axes = f"mesh axes {self.tp_mesh.mesh_dim_names or '(unnamed)'} of sizes {tuple(self.tp_mesh.shape)}"
        for _, _, _, _, fqn, param in self.entries:
            what = f"{fqn} of shape {tuple(param.shape)}"
            if not isinstance(param, DTensor):
                raise ValueError(
                    f"{what} is a plain tensor among experts on {axes}: its gradient would miss the tokens of other ranks. Put "
                    "it on that mesh too, or outside of what modules= names"
                )
            for axis, placement in enumerate(param.placements):
                if placement.is_shard() and param.shape[placement.dim] % param.device_mesh.size(axis):
                    raise ValueError(
                        f"{what}, an expert's weight, is cut on dim {placement.dim} over {axes}, whose axis {axis} does not "
                        "divide it: ranks would hold different numbers of experts or features; use an axis that does"
                    )

    def _check_module(self, module: nn.Module, what: str) -> None:
        if STATE in module.__dict__:
            raise ValueError(
                f"{what} was given to a GTPStyle before: apply one style to the root (its options modules= and "
                "exclude= choose weights), or one to each of several modules that do not contain each other; a style with "
                "is_expert=True comes before the dense one"
            )
        if is_te(type(module)):
            refuse_te(module, what, self.style.is_expert)
        if "forward" in module.__dict__ and is_te(type(module)):
            raise ValueError(
                f"{what} on {self.axis}: the forward of its {type(module).__name__} was replaced on the instance, which would "
                "bypass the gather; define forward on a subclass"
            )
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _HOOKS_THAT_COMPUTE_WEIGHTS):
                raise ValueError(
                    f"{what} on {self.axis}: a {type(hook).__name__} hook computes a weight from it outside of forward; use "
                    "torch.nn.utils.parametrizations (or parametrize) instead, before GTPStyle"
                )

    def _check_tie(self, param: nn.Parameter) -> None:
        member = getattr(param, SUCCESSOR, lambda: None)()
        if member is not None and member.runtime.config != self.style.config:
            raise ValueError(
                f"{member.fqn} is tied to a parameter of {type(self.module).__name__} under another GTPConfig: apply one "
                "style to a module that contains both"
            )
        if member is not None and member.param.shape != param.shape:
            raise ValueError(
                f"a parameter of {type(self.module).__name__} of shape {tuple(param.shape)} is tied to one expert of "
                f"{member.fqn}, which is one parameter for all: untie them"
            )

    def _find_tp_mesh(self) -> None:
        """The model-parallel mesh of all experts, or of the whole model but for these: so that all parameters of one
        style are stored on one mesh."""
        meshes = dict.fromkeys(layout.mesh for layout in self.tp.values() if layout is not None)
        others = (m for m in self.root.modules() if not self.style.is_expert and not is_taken_by_experts(m))
        for param in (param for module in others for param in module._parameters.values()):
            if isinstance(param, DTensor) and param.device_mesh.ndim == 1 and id(param) not in self.tp:
                if not set(param.device_mesh.mesh.tolist()) & set(self.mesh.mesh.tolist()) - {dist.get_rank()}:
                    meshes.setdefault(param.device_mesh)
        if len(meshes) > 1:
            raise ValueError(
                f"GTPStyle: parameters of one model lie on {len(meshes)} different tensor-parallel meshes "
                f"({', '.join(str(m.mesh_dim_names) for m in meshes)}); call parallelize_module once for each of its parts, "
                "on that part itself"
            )
        self.tp_mesh = next(iter(meshes), None)

    def _check_sharded(self, module: nn.Module, what: str, local: torch.Tensor) -> None:
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            option = "sparse=True" if module.sparse else "max_norm"
            raise ValueError(f"{what} on {self.axis}: nn.Embedding({option}) cannot be sharded; name it in exclude=")
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq and isinstance(module.weight, DTensor):
            raise ValueError(
                f"{what} on {self.axis}: nn.Embedding(scale_grad_by_freq=True) cannot be tensor parallel, since no rank sees "
                "how often a token occurs; name it in exclude=, or leave it out of the tensor-parallel plan"
            )
        if isinstance(module, nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
            raise ValueError(f"{what} on {self.axis}: EmbeddingBag with sparse or max_norm cannot be sharded")
        if not local.is_contiguous():
            raise ValueError(
                f"{what} on {self.axis} has strides {local.stride()}: make it contiguous before GTPStyle, or name it in "
                "exclude="
            )


def te_parameters(modules: dict[str, nn.Module], root: nn.Module, mesh: DeviceMesh) -> Replacements | None:
    """For models with modules of TransformerEngine's: see there."""
    found = [module for module in modules.values() if is_te(type(module)) and STATE not in module.__dict__]
    return te_room().Replacements(found, root, mesh) if found else None


def _is_chosen(modules: ModuleFilter, name: str, module: nn.Module) -> bool:
    """Whether ``modules`` (see :class:`GTPStyle`) means ``module``."""
    return modules(name, module) if callable(modules) else any(fnmatch.fnmatchcase(name, p) for p in modules)


def is_taken_by_experts(module: nn.Module) -> bool:
    """Whether a style with ``is_expert`` has parameters of ``module`` already."""
    return any(member.runtime.domain.is_expert for member in state_members(module))


def _borrowed_children(root: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules that read the parameters of children without calling them, with the names of those children."""
    containers = (nn.ParameterList, nn.ParameterDict)
    for module in root.modules():
        if isinstance(module, containers):
            continue
        names = []
        for name, child in module.named_children():
            if isinstance(child, containers):  # which may hold others of their kind
                names += [f"{name}.{below}" if below else name for below, _ in child.named_modules()]
        if isinstance(module, nn.MultiheadAttention):
            names.append("out_proj")
        if names:
            yield module, names
