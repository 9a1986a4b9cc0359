"""The fake process group, and what meta tensors need to stand for those of a GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

import gtp_dtensor.domain
from gtp_dtensor.reduce import Reducer
from gtp_dtensor.transport import CollectiveTransport, Transfer
from gtp_dtensor.weight import ShardedWeight

from .record import GATHERED, IN_FLIGHT, Recorder


@contextmanager
def fake_world(world: int, rank: int) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world`` ranks, alone: groups can be made, and no byte moves."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: plan in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_layouts()


def _forget_layouts() -> None:
    """DTensor remembers what operators give, with the mesh; one of a later world may be equal and have other groups."""
    for name in (
        "_clear_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
    ):
        clear = getattr(debug, name, None)
        if clear is not None:
            clear()


class _Recorded:
    """In place of a collective's work handle."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number, self._is_done = recorder, number, False

    def wait(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._recorder.wait(self._number)


class RecordedTransport(CollectiveTransport):
    """Writes down what it is asked to move. Gathers and reductions have a communicator each, as with NCCL."""

    recorder: Recorder | None = None  # of the program that runs now

    def __init__(self, mesh_group: dist.ProcessGroup, device: torch.device, name: str, gathers: bool = True) -> None:
        super().__init__(mesh_group, device, name, gathers)
        self._name = name
        self._ranks = tuple(dist.get_process_group_ranks(mesh_group))

    def _issue(self, what: str, tensors: tuple, whole: tuple, kind: str) -> Transfer:
        recorder = self.recorder
        if recorder is None:  # while a model is built
            return Transfer.done(*tensors)
        stream = f"{self._name} {'gathers' if what == 'all_gather' else 'reductions'}"
        num_bytes = sum(tensor.nbytes for tensor in whole)
        number = recorder.issue(what, self._ranks, num_bytes, stream, self._name, kind)
        return Transfer(_Recorded(recorder, number), None, tensors)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, dim: int = 0) -> Transfer:
        """See the base class."""
        return self.all_gather_parts((buffer,), (shard,), dim)

    def all_gather_parts(
        self, buffers: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], dim: int
    ) -> Transfer:
        """See the base class."""
        kind = "refresh" if self._name.endswith("_shard") else "gather"
        if self.recorder is not None and kind == "gather":
            self.recorder.memory.move(buffers, GATHERED)
        return self._issue("all_gather", (*buffers, *parts), buffers, kind)

    def reduce_scatter(self, out: torch.Tensor, buffer: torch.Tensor, dim: int = 0) -> Transfer:
        """See the base class."""
        if self.size == 1:
            return super().reduce_scatter(out, buffer, dim)
        if self.recorder is not None:
            self.recorder.memory.move((out, buffer), IN_FLIGHT)
        return self._issue("reduce_scatter", (out, buffer), (buffer,), "reduce")

    def all_to_all(self, buffer: torch.Tensor, dim: int = 0) -> Transfer:
        """See the base class."""
        rows = buffer.unflatten(dim, (self.size, buffer.shape[dim] // self.size))
        sent = rows.movedim(dim, 0).contiguous()
        parts = torch.empty_like(sent)
        if self.recorder is not None:
            self.recorder.memory.move((parts, sent), IN_FLIGHT)
        return self._issue("all_to_all", (parts, sent), (sent,), "reduce")

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """See the base class."""
        if self.size > 1:
            self._issue("all_reduce", (buffer,), (buffer,), "small").wait()

    def all_reduce_max(self, buffer: torch.Tensor) -> None:
        """See the base class."""
        self.all_reduce(buffer)

    def start_all_reduce(self, buffer: torch.Tensor) -> Transfer:
        """See the base class."""
        return self._issue("all_reduce", (buffer,), (buffer,), "reduce")

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every rank has this one's numbers."""
        return [numbers] * self.size


def _choose_recorded(requested: str, mesh: DeviceMesh, device: torch.device, name: str) -> RecordedTransport:
    if requested == "symmetric":
        raise NotImplementedError('[gtp] transport = "symmetric" is not planned yet; set it to "collective" or "auto"')
    return RecordedTransport(mesh.get_group(), device, name)


class _RMSNorm(torch.autograd.Function):
    """One kernel each way, as on a GPU; the meta device has only what it is composed of."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor | None):
        y = torch.empty_like(x)
        rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        _note("rms_norm", x, y, rstd)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor) -> tuple:
        x, weight, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = None if weight is None else torch.empty_like(weight)
        _note("rms_norm_backward", grad_y, x, rstd, grad_x)
        return grad_x, grad_weight


def _note(name: str, *tensors: torch.Tensor) -> None:
    if RecordedTransport.recorder is not None:
        RecordedTransport.recorder.kernel(name, tensors)


def _rms_norm(x: torch.Tensor, normalized_shape, weight: torch.Tensor | None = None, eps: float | None = None):
    if not isinstance(x, DTensor):
        return _RMSNorm.apply(x, weight)
    if isinstance(weight, DTensor):
        is_cut = any(placement.is_shard() for placement in x.placements)
        weight = weight.to_local(grad_placements=[Partial() if is_cut else Replicate()])
    return DTensor.from_local(_RMSNorm.apply(x.to_local(), weight), x.device_mesh, x.placements, run_check=False)


def _attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A fused kernel with the operations of a causal one, which all models here are."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, True, False, scale=scale)[
        0
    ]


def _balanced_counts(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.histc`` of tokens' experts: as many for each, as real numbers, which programs on the host read."""

    @functools.wraps(histc)
    def counted(input: torch.Tensor, bins: int = 100, *args, **kwargs) -> torch.Tensor:
        if input.device.type != "meta":
            return histc(input, bins, *args, **kwargs)
        each, more = divmod(input.numel(), bins)
        return torch.tensor([each + (place < more) for place in range(bins)], dtype=input.dtype, device="cpu")

    return counted


def _told(recorder: Recorder | None, start: Callable) -> Callable:
    """A method of ``Reducer`` that starts a reduction over replicas, of which the library tells no observer."""

    @functools.wraps(start)
    def told(reducer: Reducer, weight: ShardedWeight, *args):
        if recorder is None:
            return start(reducer, weight, *args)
        recorder.begin("reduce", weight.fqn, None)
        try:
            return start(reducer, weight, *args)
        finally:
            recorder.end()

    return told


@contextmanager
def meta_stands_for_gpu(recorder: Recorder | None = None) -> Iterator[None]:
    """Inside, what the library moves goes to ``recorder``, and kernels that a GPU has in one piece are one; tokens are
    dealt out to experts evenly."""
    replaced = (
        (gtp_dtensor.domain, "choose_transport", _choose_recorded),
        (gtp_dtensor.domain, "CollectiveTransport", RecordedTransport),
        (RecordedTransport, "recorder", recorder),
        (Reducer, "_over_shard_axis", _told(recorder, Reducer._over_shard_axis)),
        (Reducer, "_over_copy_axis", _told(recorder, Reducer._over_copy_axis)),
        (F, "rms_norm", _rms_norm),
        (F, "scaled_dot_product_attention", _attention),
        (torch, "histc", _balanced_counts(torch.histc)),
    )
    if any(f"gtp_dtensor.wire.{name}" in sys.modules for name in ("float8", "mx_linear", "grouped_linear")):
        from .quantized_gemms import replaced_methods  # which imports torchao

        replaced += replaced_methods(recorder)
    with ExitStack() as stack:
        for owner, name, new in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield
