"""Writes down what one rank gives its device to do: kernels, collectives, waits, and memory by kind."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp  # which also gives c10d's operators meta kernels
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gtp_dtensor.modes import Observer
from gtp_dtensor.schedule import Kind

_BLOCK = 512  # bytes that the caching allocator rounds to
_C10D = torch.ops._c10d_functional
_WAIT = _C10D.wait_tensor.default
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_NO_KERNEL = ("_unsafe_view", "detach", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
# Kinds of memory, as tables and charts name them.
PARAMETERS, OPTIMIZER, COMPUTE_SHARDS, GATHERED = "parameters", "optimizer state", "compute shards", "gathered"
GRADIENTS, IN_FLIGHT, ACTIVATIONS, WORKSPACE = "gradients", "in flight", "activations", "workspace"
KINDS = (PARAMETERS, OPTIMIZER, COMPUTE_SHARDS, GRADIENTS, IN_FLIGHT, GATHERED, ACTIVATIONS, WORKSPACE)
# Of cuBLAS and cuBLASLt, 32 MiB each from compute capability 9.0 on, which torch's allocator gives them for good.
WORKSPACE_BYTES = 2 * 32 * 2**20


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attributes:
    name: of the operator.
    flops: floating-point operations that are executed (half of a square for causal attention).
    num_bytes: read and written.
    unit: what executes them: "bf16", "fp8", "fp32" or "attention".
    shape: of a GEMM, (rows, columns, how many of them, inner dim): what tells how many processors can work at it.
    """

    name: str
    flops: int
    num_bytes: int
    unit: str
    shape: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is issued.

    Attributes:
        number: unique in the list.
        what: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send" or "recv".
        ranks: that take part.
        num_bytes: of the larger of what a rank gives and gets: the gathered tensor, the unsharded gradient.
        stream: collectives of one stream follow each other.
        weight: FQN; "" for what no sharded weight is responsible for.
        axis: name of the mesh axis, for people; "gtp_shard" are the replicas of "gtp" that cut its optimizer state.
        kind: "gather", "refresh", "reduce", "small", "tp", "ep" or "pp".
    """

    number: int
    what: str
    ranks: tuple[int, ...]
    num_bytes: int
    stream: str
    weight: str
    axis: str
    kind: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The computing stream waits for collective ``number``."""

    number: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for the device."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the list: "forward 0", "backward 0", "optimizer", "end"."""

    name: str


Event = Kernel | Start | Wait | Sync | Mark


@dataclass
class Memory:
    """Bytes in memory, as the program allocates and frees them. What memory is for is often known only later: the kind
    that it had last holds for all its life.

    Attributes:
        log: (what, bytes that come or, negative, go), in order; ``what`` is a list of one kind.
    """

    log: list[tuple[list[str], int]] = field(default_factory=list)
    _live: dict[int, tuple[list[str], int]] = field(default_factory=dict)  # by storage

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """``tensor`` lives; where its memory is known already it keeps its kind."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        num_bytes = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._live[key] = what, _ = [kind], num_bytes
        self.log.append((what, num_bytes))
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        what, num_bytes = self._live.pop(key)
        self.log.append((what, -num_bytes))

    def move(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """The memory of ``tensors`` is of ``kind``. Sums of gradients stay that while they travel."""
        for tensor in tensors:
            self.add(tensor, kind)
            what, _ = self._live[tensor.untyped_storage()._cdata]
            if (what[0], kind) != (GRADIENTS, IN_FLIGHT):
                what[0] = kind

    def course(self) -> Iterator[Counter]:
        """Bytes by kind after each entry of the log: the same object, changed."""
        now: Counter = Counter()
        for (kind,), num_bytes in self.log:
            now[kind] += num_bytes
            yield now

    def peak(self) -> dict[str, int]:
        """Bytes by kind where they are most in all, with the workspaces of libraries."""
        total = most = place = 0
        for position, (_, num_bytes) in enumerate(self.log):
            total += num_bytes
            if total > most:
                most, place = total, position
        now = next(itertools.islice(self.course(), place, None), Counter())
        return {kind: now[kind] for kind in KINDS} | {WORKSPACE: WORKSPACE_BYTES}


class Recorder(Observer):
    """The list of events of what runs inside of it, on meta tensors; see [Note: how a plan is made].

    Attributes:
        events: so far.
        memory: see :class:`Memory`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.memory = Memory()
        self.axes: dict[tuple[int, ...], str] = {}  # ranks -> what their axis is called
        self.kind = ACTIVATIONS  # of what is allocated now
        self._fqn = ""  # what the library does now is for this weight
        self._what: tuple[str, Kind | None] = ("", None)
        self._num_started = 0
        self._pending: dict[int, int] = {}  # storage of what a functional collective brings -> its number

    # ---- what the library tells

    def begin(self, what: str, fqn: str, kind: Kind | None) -> None:
        self._fqn, self._what = fqn, (what, kind)

    def end(self) -> None:
        self._fqn, self._what = "", ("", None)

    def issue(self, what: str, ranks: tuple[int, ...], num_bytes: int, stream: str, axis: str, kind: str) -> int:
        """:meth:`start`, for the weight that the library works for now."""
        use = self._what[1]
        kind = kind if use is None else f"{kind} {use.name.lower()}"
        return self.start(what, ranks, num_bytes, stream, kind, self._fqn, axis)

    # ---- what others write down

    def mark(self, name: str) -> None:
        self.events.append(Mark(name))

    def kernel(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        flops: int = 0,
        unit: str = "bf16",
        shape: tuple[int, int, int, int] | None = None,
    ) -> None:
        """One kernel that reads or writes all of ``tensors``, once each."""
        tensors = [t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in tensors]
        self.events.append(Kernel(name, flops, sum(map(_num_bytes, tensors)), unit, shape))

    def start(
        self,
        what: str,
        ranks: tuple[int, ...],
        num_bytes: int,
        stream: str,
        kind: str,
        weight: str = "",
        axis: str = "",
    ) -> int:
        """A collective; returns its number."""
        self._num_started += 1
        axis = axis or self.axes.get(ranks, kind)
        self.events.append(Start(self._num_started, what, ranks, num_bytes, stream, weight, axis, kind))
        return self._num_started

    def wait(self, number: int) -> None:
        self.events.append(Wait(number))

    # ---- what operators do

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if any(issubclass(cls, (DTensor, AsyncCollectiveTensor)) for cls in types):
            return NotImplemented  # they come back as what they consist of
        if any(issubclass(cls, FakeTensor) for cls in types):
            return func(*args, **kwargs)  # DTensor finds out about shapes
        if func.namespace in ("_c10d_functional", "c10d"):
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if _is_on_device(leaf)]
        if not func.is_view:
            name = func.overloadpacket.__name__
            if name not in _NO_KERNEL:
                self._note(func, name, args, kwargs, out, outs)
            for tensor in outs:
                self.memory.add(tensor, self.kind)
        return out

    def _note(self, func: Callable, name: str, args: tuple, kwargs: dict, out: object, outs: list) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _is_on_device(leaf)]
        flops, unit, shape = _flops(func, name, args, kwargs, out, leaves)
        num_bytes = sum(_num_bytes(tensor) for tensor in {id(t): t for t in (*leaves, *outs)}.values())
        if name in ("embedding", "index"):  # rows that are read, not all
            num_bytes = 2 * sum(map(_num_bytes, outs))
        if num_bytes:
            self.events.append(Kernel(name, flops, num_bytes, unit, shape))

    def _collective(self, func: Callable, args: tuple, kwargs: dict):
        name = func.overloadpacket.__name__
        tensor = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        if func is _WAIT:
            number = self._pending.pop(tensor.untyped_storage()._cdata, None)
            if number is not None:
                self.wait(number)
            return tensor
        if name == "_wrap_tensor_autograd":  # whose meta kernel would give a tensor that nobody waits for
            return AsyncCollectiveTensor(tensor)
        if not _is_on_device(
            tensor
        ):  # numbers of tokens: every peer sends what this rank does, and the host reads them
            self.events.append(Sync())
            return tensor.clone()
        if func.namespace == "c10d":
            return self._c10d(func, name, args, kwargs)
        out = func(*args, **kwargs)
        group = CollectiveOp.get_process_group(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        what = _COLLECTIVES.get(name)
        if what is None:
            raise NotImplementedError(f"planning a job that uses {func}: what it moves is not known")
        num_bytes = max(_num_bytes(tensor), _num_bytes(out))
        kind = "ep" if what == "all_to_all" else "tp"
        if len(ranks) > 1:
            self._pending[out.untyped_storage()._cdata] = self.start(what, ranks, num_bytes, str(ranks), kind)
        self.memory.add(out, self.kind)
        return out

    def _c10d(self, func: Callable, name: str, args: tuple, kwargs: dict):
        """Collectives called by torch.distributed's functions, whose callers wait for them at once."""
        what = {"allreduce_": "all_reduce", "alltoall_base_": "all_to_all", "allgather_": "all_gather"}.get(name)
        if what is None:
            raise NotImplementedError(f"planning a job that uses {func}: what it moves is not known")
        ranks = tuple(dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args)))
        if len(ranks) > 1:
            num_bytes = sum(_num_bytes(leaf) for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
            kind = "refresh" if self._fqn else "small"
            self.wait(self.start(what, ranks, num_bytes, str(ranks), kind, self._fqn))
        return func(*args, **kwargs)


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta" and type(value) is not FakeTensor


def _num_bytes(tensor: torch.Tensor) -> int:
    """Of the elements in memory: expanded dims do not count."""
    if 0 in tensor.stride():
        return tensor.itemsize * math.prod(n for n, step in zip(tensor.shape, tensor.stride()) if step)
    return tensor.nbytes


def _flops(func, name: str, args: tuple, kwargs: dict, out: object, leaves: list) -> tuple[int, str, tuple | None]:
    """(operations, unit, shape), see :class:`Kernel`."""
    if name == "_grouped_mm":
        return _grouped_flops(args[0], args[1])
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0, "bf16", None
    shape = None
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        kwargs = {}  # out_dtype is none of the counter's business
        args = args[:3] if name in ("addmm", "baddbmm") else args[:2]
        one, other = args[-2:]
        shape = (one.shape[-2], other.shape[-1], math.prod(one.shape[:-2]), one.shape[-1])
    flops = count(*args, **kwargs, out_val=out)
    if "attention" in name:
        return flops // 2, "attention", None  # all are causal
    unit = "fp8" if name == "_scaled_mm" else "fp32" if leaves[0].dtype is torch.float32 else "bf16"
    return flops, unit, shape


def _grouped_flops(one: torch.Tensor, other: torch.Tensor) -> tuple[int, str, tuple]:
    """Of a GEMM for each expert, who have equal numbers of tokens: (tokens, in) x (experts, in, out) or, for the
    gradient of the weights, (out, tokens) x (tokens, in)."""
    columns = other.shape[-1]
    if other.dim() == 3:
        tokens = one.shape[0] // other.shape[0]
        return 2 * one.numel() * columns, "bf16", (tokens, columns, other.shape[0], one.shape[1])
    return 2 * one.numel() * columns, "bf16", (one.shape[0], columns, 1, one.shape[1])
