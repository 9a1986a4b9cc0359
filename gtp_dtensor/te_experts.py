"""Expert parallelism with TransformerEngine's GroupedLinear, which knows nothing of it: each rank of the axis builds one for
experts of its own, under the same names, and moves tokens itself."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from .members import STATE
from .te_modules import EXPERT_MESH, is_grouped
from .wires import is_te


class TEExpertParallel(ParallelStyle):
    """Says that the experts of a te.GroupedLinear (or te.ops.GroupedLinear) are those of this rank of an axis: all ranks'
    together are one logical stack, rank r's from r x ``num_gemms`` on. Moves no tokens. Comes before the style of experts::

        parallelize_module(model, mesh["ep"], {"layers.*.experts": TEExpertParallel()})
        parallelize_module(model, mesh["egtp"], GTPStyle(is_expert=True, modules=["layers.*.experts"]))
        parallelize_module(model, mesh["gtp"], GTPStyle())

    The parameter ``weight`` is then a DTensor (experts of all ranks, out, in), so that clipping counts every expert and
    a checkpoint holds them all, for any number of ranks. ``bias0`` ... are DTensors of those of all ranks one after the
    other: they load on as many ranks only.

    Raises (when applied):
        ValueError: another kind of module, a mesh that is not 1-D, a module that is under GTP or tensor parallel.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = type(module).__name__
        if not is_te(type(module)) or not is_grouped(type(module)):
            raise ValueError(f"TEExpertParallel is for GroupedLinear of TransformerEngine, and got a {kind}")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"TEExpertParallel: {kind} needs the 1-D mesh of the expert-parallel axis and got a {device_mesh.ndim}-D mesh "
                f'with axes {device_mesh.mesh_dim_names}: pass a slice of it, such as mesh["ep"]'
            )
        if STATE in module.__dict__:
            raise ValueError(f"TEExpertParallel: {kind} is under GTP: apply it before GTPStyle")
        if getattr(module, "tp_size", 1) > 1:
            raise ValueError(
                f"TEExpertParallel: {kind} with tp_size={module.tp_size}: experts of other ranks whose features are cut are not "
                "served: build it with tp_size=1"
            )
        module.__dict__[EXPERT_MESH] = device_mesh
        return module
