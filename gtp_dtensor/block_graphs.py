"""Each block of a model as CUDA graphs, one for its forward, one for its backward and one for the reductions of its gradients,
with eager code between.

[Note: block graphs]
    The graph of a forward or a backward holds the gathers of its block, look-ahead among them, and those of what the next
    one begins with; that of the backward leaves gradients of weights in a ring, from where a third graph reduces them on
    another stream, beside the next block's (see [Note: borders of graphs] in graph_borders.py). Compute shards are
    rewritten outside, by whoever finds them stale first. Gathers for weights of eager code are not issued in a graph; and
    eager code, whose schedule knows nothing of what graphs use, issues none for them.

    Gradients of sharded weights go into memory that stays: what a graph adds to is ``.grad`` itself, zeroed where it was
    None. Gradients of parameters that stay whole come out of the graph, and are reduced with those of the whole model when
    its backward ends. Activations stay in the graphs' memory from a forward to its backward: a forward that comes before
    that, of the block or of one before it, runs without a graph. (All graphs that compute share memory. What one uses for a
    while may be where activations of those captured later are; those of its own and of earlier ones are nobody else's.)
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.nn as nn

from .graph_borders import BorderMemory, GradientRing, Handover
from .graph_capture import CudaRecorder, Recorder, Runtimes
from .graph_checks import GraphError, HostReads, Places
from .graphed_block import Block, Graph, graphed_modules
from .modes import in_backward
from .plan import clean_fqn

logger = logging.getLogger(__name__)
_LEAST_WARMUP_PASSES = 2  # the first one records the schedule, the second one runs it


def graph_blocks(
    model: nn.Module, modules: Sequence[str] = ("layers.*",), *, num_warmup_passes: int = _LEAST_WARMUP_PASSES
) -> GraphedBlocks:
    """Run the forwards and backwards of some modules of ``model`` as CUDA graphs; see [Note: block graphs].

    For models that ask the host on their way, as dispatch to experts does: that stays eager, and attention, dense and shared
    parts are graphed. The first passes run as they are; when the next one begins, all modules are captured at once, which
    computes nothing. A call without gradients, in another mode or shape, while replicas' gradients are kept back, or before
    the backward of the one before runs without a graph. Results are those without graphs, bit for bit where kernels are
    deterministic.

    Args:
        model: that ``parallelize_module`` was called on.
        modules: FQN patterns; of nested matches the outermost. Each is called once a pass, with tensors and constants, and
            returns tensors; all its trained parameters are under GTP.
        num_warmup_passes: forwards of ``model`` (with backwards) before the capture, at least two.

    Raises:
        ValueError: an argument that cannot be served; the model is not on a GPU.
        GraphError: the pass that captures cannot: names the module and the remedy. Graphs are off from then on: run the pass
            again.
    """
    devices = {param.device for param in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "nowhere"
        raise ValueError(f"graph_blocks: CUDA graphs need a model on one GPU, and its parameters are on {found}")
    recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
    return GraphedBlocks(model, modules, recorder=recorder, num_warmup_passes=num_warmup_passes)


def _outermost(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Modules by FQN."""
    if isinstance(patterns, str):
        raise TypeError("graph_blocks(modules=...) takes a list of patterns, not one string")
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        depth = pattern.count(".")
        names = [
            (name, module)
            for name, module in model.named_modules()
            if clean_fqn(name).count(".") == depth and fnmatch.fnmatch(clean_fqn(name), pattern)
        ]
        if not names:
            raise ValueError(f"graph_blocks(modules=...): pattern {pattern!r} matches no module of the model")
        for name, module in names:
            found.setdefault(clean_fqn(name), module)  # of a wrapper and what is in it, the wrapper
    inner = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    return {name: module for name, module in found.items() if name not in inner}


class _PassHook:
    """Tells that a forward of the model begins; not of a copy of the model."""

    def __init__(self, owner: GraphedBlocks) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, module: nn.Module, args: tuple) -> None:
        owner = self._owner()
        if owner is not None:
            owner.begin_pass(module)

    def __deepcopy__(self, memo: dict) -> _PassHook:
        return self


class GraphedBlocks:
    """What :func:`graph_blocks` returns.

    Attributes:
        num_replays: of forwards and backwards, so far.
        num_eager: calls that could not be replays; each reason is logged once for a module.
        num_border_gathers: that the graphs of one pass make for the graph after them.
        num_late_gathers: that a graph should have found made, and that were made before its replay instead, so far.
        is_captured: whether graphs are in use.
        runtimes, recorder: of the model; what captures.
        ring, border: memory of what crosses borders, see [Note: borders of graphs].
        last: the graph that was replayed last, of those that compute.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str], *, recorder: Recorder, num_warmup_passes: int) -> None:
        if isinstance(num_warmup_passes, bool) or not isinstance(num_warmup_passes, int) or num_warmup_passes < 0:
            raise ValueError(f"graph_blocks(num_warmup_passes={num_warmup_passes!r}): must be an integer of at least 0")
        if os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0":
            raise ValueError(
                "graph_blocks: NCCL_GRAPH_MIXING_SUPPORT=0 forbids a communicator in a graph beside others, as reductions are: "
                "unset it"
            )
        found = _outermost(model, modules)
        graphed = graphed_modules(model)
        if graphed:
            raise ValueError(f"graph_blocks: {graphed[0]} is a graph already, or will be one: release() those first")
        self._model = model
        self.recorder = recorder
        self._num_warmup_passes = max(num_warmup_passes, _LEAST_WARMUP_PASSES)
        self._num_passes = self._num_called = 0
        self._reads = HostReads(model)
        self.runtimes = Runtimes(model, "graph_blocks")
        if not self.runtimes.all:
            raise ValueError(
                "graph_blocks: the model is not under GTP; torch.cuda.make_graphed_callables serves others"
            )
        self.num_replays = self.num_eager = 0
        self.is_captured = False
        self._schedules: list[dict] = []
        self.ring, self.border = GradientRing(), BorderMemory()
        self.last: Graph | None = None
        self.num_border_gathers = self.num_late_gathers = 0
        self._blocks = [Block(self, fqn, module) for fqn, module in found.items()]
        self._hook = model.register_forward_pre_hook(_PassHook(self))
        self._finalizer = weakref.finalize(self, recorder.release)

    def release(self) -> None:
        """Free all graphs, and give the modules their forwards back. To be called before process groups are destroyed."""
        for block in self._blocks:
            block.uninstall()
            for graph in block.graphs:
                graph.forget()
        self._hook.remove()
        self._blocks, self.is_captured, self.last = [], False, None
        self.recorder.release()
        self.ring, self.border = GradientRing(), BorderMemory()  # nothing reads the memory of before any more

    @property
    def num_bytes(self) -> int:
        """Of memory for what crosses borders, beyond what graphs need anyway."""
        memory = [*self.border.buffers(), *(slot.memory for slot in self.ring.slots())]
        return sum(tensor.nbytes for tensor in memory)

    def next_place(self) -> int:
        """A block is called in a warm-up."""
        self._num_called += 1
        return self._num_called

    def later_block_waits(self, block: Block) -> bool:
        """Whether a forward of a block that was captured after ``block`` was replayed, and its backward may come: what
        ``block`` needs for a while may lie where activations of such are."""
        later = self._blocks[self._blocks.index(block) + 1 :]
        return any(other.awaited() is not None for other in later)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a block's forward in a warm-up."""
        watches = self._num_passes == _LEAST_WARMUP_PASSES and torch.cuda.is_available()
        with self._reads.watching() if watches else contextlib.nullcontext():
            yield

    def failed(self) -> None:
        """Called by the recorder: a capture did."""
        self.runtimes.abandon(self._schedules)

    def begin_pass(self, module: nn.Module) -> None:
        """A forward of ``module`` begins."""
        if module is not self._model or self.is_captured:
            return
        if not (module.training and torch.is_grad_enabled()) or in_backward():
            return
        if self._num_passes < self._num_warmup_passes or self.runtimes.takes_times:
            self._num_passes += 1
            self._num_called = 0
            for block in self._blocks:
                block.num_calls = 0
                if self._num_passes == self._num_warmup_passes:
                    block.make_gradients()
            return
        try:
            self._reads.refuse()
            for block in self._blocks:
                block.check()
            self._capture()
        except GraphError:
            self.release()
            raise
        except Exception as error:
            where = Places(self._model).of_traceback(error.__traceback__)
            self.release()
            raise GraphError(
                f"blocks cannot be captured: {where}: {error}. Nothing was computed; leave that module out of modules="
            ) from error

    def _capture(self) -> None:
        for runtime in self.runtimes.all:
            runtime.refresh_copies()
        self.runtimes.settle()
        self._schedules = self.runtimes.schedules()
        blocks = self._blocks = sorted(self._blocks, key=lambda block: block.place)  # in the order of their use
        handovers = []

        def handover_to(block: Block | None) -> Handover | None:
            if block is None:
                return None
            handovers.append(Handover(self.border, block.weights))
            return handovers[-1]

        self.recorder.prepare()
        self.ring.allocate(weight for block in blocks for weight in block.weights if weight.param.requires_grad)
        with self.recorder.apart():
            graph = None
            for block, coming in zip(blocks, [*blocks[1:], None]):
                graph = block.capture_forward(graph, handover_to(coming))
            graph = None
            for block, coming in zip(blocks[::-1], [*blocks[-2::-1], None]):
                graph = block.capture_backward(graph, handover_to(coming))
        for runtime, schedule in zip(self.runtimes.all, self._schedules):
            runtime.schedule.restore(schedule)
        self.num_border_gathers = sum(map(len, handovers))
        self.is_captured = True
        logger.info("GTP: forwards and backwards of %d modules are CUDA graphs now", len(blocks))
