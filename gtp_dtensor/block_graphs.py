"""Each block of a model as two CUDA graphs, one for its forward and one for its backward, with eager code between.

[Note: block graphs]
    A graph holds all communication of its block: gathers for its own weights, look-ahead among them, and the reductions of
    their gradients, which end in it. Compute shards are rewritten outside, by whoever finds them stale first. Gathers for
    weights of other blocks, and of eager code, are not issued in a graph; and eager code, whose schedule knows nothing of
    what graphs use, issues none for them.

    Gradients of sharded weights go into memory that stays: what a graph adds to is ``.grad`` itself, zeroed where it was
    None. Gradients of parameters that stay whole come out of the graph, and are reduced with those of the whole model when
    its backward ends. Activations stay in the graphs' memory from a forward to its backward: a forward that comes before
    that, of the block or of one before it, runs without a graph. (All graphs share memory. What one uses for a while may be
    where activations of those captured later are; those of its own and of earlier ones are nobody else's.)
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .functional import Edge, engine_edges
from .graph_capture import CudaRecorder, Recorder, Runtimes, RuntimesReplay, leaves_apart
from .graph_checks import GraphError, Held, HostReads, Places
from .layout import new_dtensor
from .members import model_members
from .modes import in_backward
from .plan import clean_fqn
from .reduce import wants_gradient_returned
from .small import SmallParam
from .weight import ShardedWeight
from .wires import is_te

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


class _GraphedForward:
    """In place of a module's ``forward``. A copied module gets its own back."""

    def __init__(self, block: _Block) -> None:
        self._block = block

    def __call__(self, *args, **kwargs):
        return self._block(args, kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        copied = memo[id(self._block.module)]
        return types.MethodType(type(copied).forward, copied)


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


class _Pass:
    """One forward whose backward may come: lives as long as autograd's graph of it."""

    def __init__(self, num_writes: list[int], versions: list[int]) -> None:
        self.num_writes = num_writes
        self.versions = versions


class _Replay(torch.autograd.Function):
    """The two graphs of a block."""

    @staticmethod
    def forward(ctx, block: _Block, anchor: torch.Tensor, *inputs: torch.Tensor):
        ctx.block = block
        ctx.made = block.replay_forward(inputs)
        block.awaited = weakref.ref(ctx.made)
        outputs = tuple(output.detach() for output in block.outputs)
        ctx.mark_non_differentiable(*(o for o, trains in zip(outputs, block.output_trains) if not trains))
        return outputs

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None):
        if torch.is_grad_enabled():  # once_differentiable lets gradients that have no graph pass in silence
            raise RuntimeError(
                f"{ctx.block.fqn}: create_graph=True cannot go through the graph of a block: release() the graphs"
            )
        if engine_edges(ctx)[0] is Edge.UNUSED:
            raise RuntimeError(
                f"{ctx.block.fqn}: gradients of some tensors only were asked for (torch.autograd.grad, inputs=), and the graph "
                "of this block computes all: call backward(), or release() the graphs"
            )
        return None, None, *ctx.block.replay_backward(ctx.made, grads)


class _Block:
    """One module with its graphs.

    Attributes:
        fqn, module: which.
        outputs: of the captured forward, flat, where each replay puts them.
        output_trains: which of them gradients flow back from.
        awaited: the newest replayed forward, while its backward may come.
        num_calls: in this pass.
        place: among the calls of all blocks in it.
    """

    def __init__(self, owner: GraphedBlocks, fqn: str, module: nn.Module) -> None:
        self.owner, self.fqn, self.module = owner, fqn, module
        self._forward = module.forward
        self.outputs: list[torch.Tensor] = []
        self.output_trains: list[bool] = []
        self.awaited: Callable[[], _Pass | None] = lambda: None
        self.num_calls = self.place = 0
        self.sample: tuple[list, Any, list[bool]] | None = (
            None  # of a warm-up: leaves, their tree, which need gradients
        )
        self.is_captured = False
        self._kind: tuple | None = None
        self._told: set = set()
        members = model_members(module)
        self.weights = [m for m in members if isinstance(m, ShardedWeight)]
        self._smalls = [m for m in members if isinstance(m, SmallParam)]
        self._runtimes = list(dict.fromkeys(m.runtime for m in members))
        module.__dict__["forward"] = _GraphedForward(self)

    def uninstall(self) -> None:
        """Give the module its forward back."""
        self.module.__dict__.pop("forward", None)
        if self._forward != getattr(self.module, "forward", None):  # it had one of its own
            self.module.forward = self._forward

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled() or not self.module.training:
            return self._forward(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        if not self.is_captured:
            return self._warm_up(leaves, tree)
        reason = self._reason_against(leaves, tree)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("GTP: %s runs without its graph: %s", self.fqn, reason)
            self.owner.num_eager += 1
            return self._forward(*args, **kwargs)
        outputs = _Replay.apply(self, self._anchor, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        return tree_unflatten(list(outputs), self._output_tree)

    # ---- warm-up

    def _warm_up(self, leaves: list, tree: Any) -> Any:
        trains = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.sample = [_empty(leaf) for leaf in leaves], tree, trains
        if not in_backward():
            self.num_calls += 1
            self.place = self.owner.next_place()
        args, kwargs = tree_unflatten(leaves, tree)
        with self.owner.watching():
            return self._forward(*args, **kwargs)

    def _reason_against(self, leaves: list, tree: Any) -> str | None:
        """Why this call cannot be a replay."""
        if _kind(leaves, tree) != self._kind:
            return "it was captured with inputs of other shapes, dtypes, constants or needs of gradients"
        if self.awaited() is not None:
            return "it is called again before its backward, whose activations its graph holds"
        if self.owner.later_block_waits(self):
            return "a block after it waits for its backward, whose activations are in memory that this graph writes to"
        if any(r.reducer.has_replicas and not r.syncs_gradients for r in self._runtimes):
            return "gradients are kept back from the replicas (set_requires_gradient_sync)"
        replaced = self._held.replaced()
        return None if replaced is None else f"{replaced} was replaced, frozen or thawed"

    # ---- capture

    def check(self) -> None:
        """Raise :class:`GraphError` where the module cannot have graphs."""
        if self.sample is None or self.num_calls != 1:
            raise GraphError(
                f"{self.fqn}: called {self.num_calls} times in a training forward; a block that is graphed is called once. Name "
                "others in modules="
            )
        ours = {id(member.param) for member in (*self.weights, *self._smalls)}
        if {m for m in self.weights if m.param.requires_grad} != self._grads.keys():
            raise GraphError(f"{self.fqn}: weights were frozen or thawed since the last pass: make its graphs anew")
        of_te = next((name for name, m in self.module.named_modules() if is_te(type(m))), None)
        if of_te is not None:
            raise GraphError(
                f"{self.fqn}.{clean_fqn(of_te)}: modules of TransformerEngine cannot be graphed in blocks yet"
            )
        for name, param in self.module.named_parameters():
            fqn = f"{self.fqn}.{clean_fqn(name)}"
            if param.requires_grad and id(param) not in ours:
                raise GraphError(f"{fqn}: a trained parameter that is not under GTP, in a block that is graphed")
            if wants_gradient_returned(param):
                raise GraphError(
                    f"{fqn}: a hook waits for its gradient, which a graphed block does not bring by: remove it"
                )

    def capture_forward(self, recorder: Recorder) -> None:
        """Within a capture of all blocks."""
        leaves, tree, trains = self.sample
        needs = iter(trains)
        static = [
            torch.zeros_like(leaf).requires_grad_(next(needs)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self._inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        self._kind = _kind(static, tree)
        self._held = Held(self.module, ())
        # Of autograd's graph of each replay, also where no input needs a gradient.
        self._anchor = torch.zeros((), device=self._inputs[0].device if self._inputs else None, requires_grad=True)
        args, kwargs = tree_unflatten(static, tree)
        self._forward_replays = RuntimesReplay(self.owner.runtimes, is_part=True)

        def captured() -> list[torch.Tensor]:
            members = [*self.weights, *self._smalls]
            with self.owner.runtimes.capturing(self._forward_replays, self.weights), leaves_apart(members):
                result = self._forward(*args, **kwargs)
            outputs, self._output_tree = tree_flatten(result)
            if not all(isinstance(output, torch.Tensor) for output in outputs):
                raise GraphError(f"{self.fqn}: returns something else than tensors, which a graph would not bring by")
            self._live = [output for output in outputs if output.requires_grad]  # with autograd's graph
            self.output_trains = [output.requires_grad for output in outputs]
            return [output.detach() for output in outputs]

        self._run_forward, self.outputs = recorder.capture(captured, self.owner.failed)
        self._output_grads = [torch.zeros_like(o) for o, trains in zip(self.outputs, self.output_trains) if trains]

    def capture_backward(self, recorder: Recorder) -> None:
        """Within a capture of all blocks, after all forwards, the last block first."""
        before = {member: member.param.grad for member in self._grads}
        self._backward_replays = RuntimesReplay(self.owner.runtimes, is_part=True)
        smalls: dict = {}

        def captured() -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
            for member, grad in self._grads.items():
                member.param.grad = grad
            for static in self._inputs:
                static.grad = None
            with self.owner.runtimes.capturing(self._backward_replays, self.weights):
                # Kept alive: no other graph gets the memory of these activations.
                torch.autograd.backward(self._live, self._output_grads, retain_graph=True)
                smalls.update(self.owner.runtimes.take_small())
            return [static.grad for static in self._inputs], [grad for _, grad, _ in smalls.values()]

        try:
            self._run_backward, (self._input_grads, found) = recorder.capture(captured, self.owner.failed)
        finally:
            for member, grad in before.items():
                member.param.grad = grad
        self._small_grads = [
            (small, param, grad, owes) for ((small, _), (param, _, owes)), grad in zip(smalls.items(), found)
        ]
        for static in self._inputs:
            static.grad = None
        self.is_captured = True

    # ---- replays

    def replay_forward(self, inputs: tuple[torch.Tensor, ...]) -> _Pass:
        """Leaves :attr:`outputs`."""
        for static, given in zip(self._inputs, inputs):
            static.data.copy_(given)
        self._give(self._run_forward, self._forward_replays)
        return _Pass([weight.num_writes for weight in self.weights], [output._version for output in self.outputs])

    def replay_backward(self, made: _Pass, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Gradients of the inputs. Those of weights go into ``.grad``."""
        if self.awaited() is not made:
            raise RuntimeError(
                f"{self.fqn}: the activations of this forward are gone, since its backward has run already: retain_graph is "
                "not served by graphed blocks"
            )
        for weight, num_writes in zip(self.weights, made.num_writes):
            weight.notice_writes()
            if weight.num_writes != num_writes:
                weight.refuse_changed()
        if [output._version for output in self.outputs] != made.versions:
            raise RuntimeError(
                f"{self.fqn}: its output was modified in place, and is needed for its backward: clone it before"
            )
        for runtime in self._runtimes:
            runtime.enter()
            runtime.reducer.pending.receive()  # what is on its way into a gradient that may be moved now
        given = [grad for grad, trains in zip(grads, self.output_trains) if trains]
        for static, grad in zip(self._output_grads, given):
            static.zero_() if grad is None else static.copy_(grad)
        self._bring_gradients()
        self._give(self._run_backward, self._backward_replays)
        for small, param, grad, owes in self._small_grads:
            kept = grad if small.runtime.syncs_gradients else grad.clone()  # until after the next replay
            small.runtime.reducer.add_small(small, (param, kept, owes))
        self.awaited = lambda: None
        return [None if grad is None else grad.detach() for grad in self._input_grads]

    def make_gradients(self) -> None:
        """Before the last warm-up: so its reductions add to gradients, as those of the graph do, and no kernel is new then."""
        self._grads = {
            member: new_dtensor(torch.zeros_like(member.param._local_tensor), member.param._spec)
            for member in self.weights
            if member.param.requires_grad
        }
        self._bring_gradients()

    def _bring_gradients(self) -> None:
        """Make ``.grad`` of sharded weights the memory that the graph adds to."""
        fresh = []
        for member, grad in self._grads.items():
            now = member.param.grad
            if now is None:
                fresh.append(grad._local_tensor)
            elif now is not grad:
                grad._local_tensor.copy_(now._local_tensor)
            member.param.grad = grad
        if fresh:
            torch._foreach_zero_(fresh)

    def _give(self, replay: Callable[[], None], replays: RuntimesReplay) -> None:
        for weight in self.weights:
            weight.notice_writes()
            if weight.compute_shard is None:
                weight.runtime.refresh_copies()
            weight.await_pieces()
        replays.give(replay)
        self.owner.num_replays += 1


class GraphedBlocks:
    """What :func:`graph_blocks` returns.

    Attributes:
        num_replays: of forwards and backwards, so far.
        num_eager: calls that could not be replays; each reason is logged once for a module.
        is_captured: whether graphs are in use.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str], *, recorder: Recorder, num_warmup_passes: int) -> None:
        if isinstance(num_warmup_passes, bool) or not isinstance(num_warmup_passes, int) or num_warmup_passes < 0:
            raise ValueError(f"graph_blocks(num_warmup_passes={num_warmup_passes!r}): must be an integer of at least 0")
        found = _outermost(model, modules)
        self._model = model
        self._recorder = recorder
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
        self._blocks = [_Block(self, fqn, module) for fqn, module in found.items()]
        self._hook = model.register_forward_pre_hook(_PassHook(self))
        self._finalizer = weakref.finalize(self, recorder.release)

    def release(self) -> None:
        """Free all graphs, and give the modules their forwards back. To be called before process groups are destroyed."""
        for block in self._blocks:
            block.uninstall()
            for replays in (getattr(block, "_forward_replays", None), getattr(block, "_backward_replays", None)):
                if replays is not None:
                    replays.forget()
        self._hook.remove()
        self._blocks, self.is_captured = [], False
        self._recorder.release()

    def next_place(self) -> int:
        """A block is called in a warm-up."""
        self._num_called += 1
        return self._num_called

    def later_block_waits(self, block: _Block) -> bool:
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
        self._recorder.prepare()
        with self._recorder.apart():
            for block in blocks:
                block.capture_forward(self._recorder)
            for block in reversed(blocks):
                block.capture_backward(self._recorder)
        for runtime, schedule in zip(self.runtimes.all, self._schedules):
            runtime.schedule.restore(schedule)
        self.is_captured = True
        logger.info("GTP: forwards and backwards of %d modules are CUDA graphs now", len(blocks))


def _empty(leaf: Any) -> Any:
    """What a static input is made of, without the values."""
    return torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf


def _kind(leaves: list, tree: Any) -> tuple:
    described = tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )
    return described, str(tree), torch.is_autocast_enabled("cuda")
