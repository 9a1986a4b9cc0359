"""A small mixture of experts in plain PyTorch, with expert parallelism by hooks as training frameworks do it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from gtp_dtensor import grouped_linear


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Experts(nn.Module):
    """A stack of gated feed-forward layers, one an expert."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, dim) / dim**0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden) / hidden**0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows (T, dim), those of one expert after the other; counts int64 (experts,) -> (T, dim)."""
        w1, w3, w2 = _local(self.w1), _local(self.w3), _local(self.w2)
        parts = rows.split(counts.tolist())
        outputs = [(F.silu(x @ w1[e].t()) * (x @ w3[e].t())) @ w2[e].t() for e, x in enumerate(parts)]
        return torch.cat(outputs)


def grouped_experts(module: Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The forward of :class:`Experts` for ``GTPStyle(forwards=...)``."""
    splits = counts.tolist()
    gate, up = (grouped_linear(module, name, rows, splits=splits) for name in ("w1", "w3"))
    return grouped_linear(module, "w2", F.silu(gate) * up, splits=splits)


class ExpertList(nn.ModuleList):
    """The same with a module an expert, and biases. Every rank runs every expert, with rows or without."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim)) for _ in range(num_experts)
        )

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See :class:`Experts`."""
        return torch.cat([expert(x) for expert, x in zip(self, rows.split(counts.tolist()))])


class MoE(nn.Module):
    """Top-k routing, a stack of routed experts and a shared one."""

    def __init__(
        self, dim: int = 8, hidden: int = 10, num_experts: int = 4, top_k: int = 2, kind: type[nn.Module] = Experts
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = kind(num_experts, dim, hidden)
        self.shared = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> the same."""
        flat = x.reshape(-1, x.shape[-1])
        scores, chosen = torch.softmax(self.router(flat), -1).topk(self.top_k)
        order = chosen.view(-1).argsort(stable=True)
        tokens = order // self.top_k
        counts = chosen.view(-1).bincount(minlength=self.num_experts)
        outputs = self.experts(flat[tokens], counts) * scores.view(-1)[order].unsqueeze(-1)
        routed = torch.zeros_like(flat).index_add(0, tokens, outputs.to(flat.dtype))
        return (self.shared(flat) + routed).view_as(x)


class Block(nn.Module):
    """A norm, a linear and a mixture of experts."""

    def __init__(self, dim: int, **moe) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.moe = MoE(dim, **moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> the same."""
        x = x + torch.tanh(self.mix(self.norm(x)))
        return x + self.moe(x)


class MoEModel(nn.Module):
    """Some blocks and a head."""

    def __init__(self, num_blocks: int = 3, dim: int = 8, **moe) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, **moe) for _ in range(num_blocks))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> the same."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ExpertParallel(ParallelStyle):
    """Whole experts over the axis: tokens travel to them and back."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._dispatch, self._combine)

    @staticmethod
    def _cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module._parameters.items()):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def _dispatch(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        rows, counts = inputs
        group, size = mesh.get_group(), mesh.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = (c.view(size, -1).sum(1).tolist() for c in (counts, theirs))
        rows = wait_tensor(all_to_all_single_autograd(rows, received, sent, group))
        # From (rank, expert) to (expert, rank) order.
        num_local = theirs.numel() // size
        owners = torch.arange(theirs.numel(), device=theirs.device).remainder(num_local).repeat_interleave(theirs)
        order = owners.argsort(stable=True)
        self._state = sent, received, order
        return rows[order], theirs.view(size, num_local).sum(0)

    def _combine(self, module: nn.Module, outputs: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        sent, received, order = self._state
        outputs = torch.empty_like(outputs).index_copy(0, order, outputs)
        return wait_tensor(all_to_all_single_autograd(outputs, sent, received, mesh.get_group()))
