"""One module whose forward and backward are CUDA graphs; see [Note: block graphs] in block_graphs.py."""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .functional import Edge, engine_edges
from .grad_hooks import guard_gradient, wants_gradient_returned
from .graph_borders import Handover, PendingReplay, RingWriter
from .graph_capture import Part, RuntimesReplay, leaves_apart
from .graph_checks import GraphError, Held, autocast_modes, refuse_written
from .graph_python import Decisions, trained_attributes
from .layout import new_dtensor
from .members import model_members
from .modes import in_backward
from .plan import clean_fqn
from .small import SmallParam
from .weight import ShardedWeight
from .wires import is_te

if TYPE_CHECKING:
    from .block_graphs import GraphedBlocks

logger = logging.getLogger(__name__)


class Graph:
    """A forward, a backward, or the reductions of one, of a block.

    Args:
        before: the graph that gathers what ``part.taken`` is.
    """

    def __init__(self, owner: GraphedBlocks, part: Part, before: Graph | None = None) -> None:
        self.part = part
        self._owner, self._before = owner, before
        self._replays = RuntimesReplay(owner.runtimes, part)
        self._run: Callable[[], None]
        self._reads: list[ShardedWeight] = []
        self._others: list[tuple[ShardedWeight, weakref.ref[torch.Tensor]]] = []

    def capture(self, body: Callable[[], Any]) -> Any:
        """What ``body`` returned."""
        owner, part = self._owner, self.part

        def captured() -> Any:
            if part.ring is not None:
                part.ring.begin()
            with owner.runtimes.capturing(self._replays):
                return body()

        self._run, result = owner.recorder.capture(captured, owner.failed, part.reduces)
        self._reads = list(dict.fromkeys((*part.own, *self._replays.gathered)))
        others = self._reads[len(part.own) :]
        self._others = [(weight, weakref.ref(weight.param._local_tensor)) for weight in others]
        return result

    def replaced(self) -> str | None:
        """A weight that it gathers, not of its own, and whose memory is another one since the capture."""
        return next((w.fqn for w, local in self._others if w.param._local_tensor is not local()), None)

    def give(self) -> None:
        """Give the current stream a replay."""
        part = self.part
        if not part.reduces:
            self._bring_weights()
            if part.ring is not None:
                for reader in dict.fromkeys(slot.reader for slot in part.ring.slots):
                    if reader is not None:
                        reader.wait()
            self._owner.last = self
            self._owner.num_replays += 1
        self._replays.give(self._run)
        if part.left is not None:
            part.left.note_gathered()

    def _bring_weights(self) -> None:
        """That it reads or gathers: compute shards as they are now, and what it does not gather itself."""
        for weight in self._reads:
            weight.notice_writes()
            if weight.compute_shard is None:
                weight.runtime.refresh_copies()
            weight.await_pieces()
        if self.part.taken is not None:
            self._owner.num_late_gathers += self.part.taken.complete(self._owner.last is self._before)

    def forget(self) -> None:
        """There will be no more replays."""
        self._replays.forget()


class _GraphedForward:
    """In place of a module's ``forward``. A copied module gets its own back."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __call__(self, *args, **kwargs):
        return self._block(args, kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        copied = memo[id(self._block.module)]
        return types.MethodType(type(copied).forward, copied)


class _Pass:
    """One forward whose backward may come: lives as long as autograd's graph of it."""

    def __init__(self, num_writes: list[int], versions: list[int]) -> None:
        self.num_writes = num_writes
        self.versions = versions


class _Replay(torch.autograd.Function):
    """The two graphs of a block."""

    @staticmethod
    def forward(ctx, block: Block, anchor: torch.Tensor, *inputs: torch.Tensor):
        ctx.block = block
        ctx.inputs = [(_is_watched(given), weakref.ref(given)) for given in inputs]
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
        found = ctx.block.replay_backward(ctx.made, grads)
        # The next replay writes to these: where somebody may keep one, a copy.
        watched = [was_watched or _is_watched(given()) for was_watched, given in ctx.inputs]
        return None, None, *(g.clone() if g is not None and is_kept else g for g, is_kept in zip(found, watched))


class Block:
    """One module with its graphs.

    Attributes:
        fqn, module: which.
        outputs: of the captured forward, flat, where each replay puts them.
        output_trains: which of them gradients flow back from.
        awaited: the newest replayed forward, while its backward may come.
        num_calls: in this pass.
        place: among the calls of all blocks in it.
        weights: sharded ones.
        graphs: forward, backward, and the reductions that follow it, once captured.
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
        self.is_captured = self._is_recomputed = False
        self.graphs: list[Graph] = []
        self._reduced: PendingReplay | None = None
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
        if in_backward():
            self._is_recomputed = True
        else:
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
        replaced = self._held.replaced() or next(filter(None, (graph.replaced() for graph in self.graphs)), None)
        if replaced is not None:
            return f"{replaced} was replaced, frozen or thawed"
        changed = self._decisions.changed()
        return None if changed is None else f"{changed}, of {self.fqn}, changed since it was captured"

    # ---- capture

    def check(self) -> None:
        """Raise :class:`GraphError` where the module cannot have graphs."""
        if self.sample is None or self.num_calls != 1:
            raise GraphError(
                f"{self.fqn}: called {self.num_calls} times in a training forward; a block that is graphed is called once. Name "
                "others in modules="
            )
        if self._is_recomputed:
            raise GraphError(
                f"{self.fqn}: activation checkpointing around it calls it again in the backward, and a graph keeps its activations: "
                "name the checkpointed module in modules=, or checkpoint others"
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

    def capture_forward(self, before: Graph | None, left: Handover | None) -> Graph:
        """Within a capture of all blocks. Returns the graph.

        Args:
            before: that of the block before.
            left: what it gathers for the block after it.
        """
        leaves, tree, trains = self.sample
        needs = iter(trains)
        static = [
            torch.zeros_like(leaf).requires_grad_(next(needs)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self._inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        self._kind = _kind(static, tree)
        self._held = Held(self.module, ())
        self._decisions = Decisions(self.module, with_root=False)
        given = [(static, static._version) for static in self._inputs]
        attributes = trained_attributes(self.module)
        # Of autograd's graph of each replay, also where no input needs a gradient.
        self._anchor = torch.zeros((), device=self._inputs[0].device if self._inputs else None, requires_grad=True)
        args, kwargs = tree_unflatten(static, tree)

        def body() -> list[torch.Tensor]:
            with leaves_apart([*self.weights, *self._smalls]):
                outputs, self._output_tree = tree_flatten(self._forward(*args, **kwargs))
            if not all(isinstance(output, torch.Tensor) for output in outputs):
                raise GraphError(f"{self.fqn}: returns something else than tensors, which a graph would not bring by")
            refuse_written(given, self.fqn)
            for name, value in trained_attributes(self.module).items():
                if attributes.get(name) is not value:
                    raise GraphError(
                        f"{self.fqn}: its forward leaves a tensor that gradients flow back from in the attribute {name}, and replays "
                        "leave none there: return it, or name smaller modules in modules="
                    )
            self._live = [output for output in outputs if output.requires_grad]  # with autograd's graph
            self.output_trains = [output.requires_grad for output in outputs]
            return [output.detach() for output in outputs]

        graph = Graph(self.owner, Part(tuple(self.weights), False, before and before.part.left, left), before)
        self.outputs = graph.capture(body)
        self._decisions.note_captured()
        self._output_grads = [torch.zeros_like(o) for o, trains in zip(self.outputs, self.output_trains) if trains]
        self.graphs = [graph]
        return graph

    def capture_backward(self, before: Graph | None, left: Handover | None) -> Graph:
        """The same, after all forwards, the last block first; and its reductions."""
        writer = RingWriter(self.owner.ring, self.fqn)
        smalls: dict = {}

        def body() -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
            for static in self._inputs:
                static.grad = None
            # As where backward() is called usually. Kept alive: no other graph gets the memory of these activations.
            with torch.autocast(self._anchor.device.type, enabled=False):
                torch.autograd.backward(self._live, self._output_grads, retain_graph=True)
            smalls.update(self.owner.runtimes.take_small())
            return [static.grad for static in self._inputs], [grad for _, grad, _ in smalls.values()]

        part = Part(tuple(self.weights), True, before and before.part.left, left, writer)
        graph = Graph(self.owner, part, before)
        self._input_grads, found = graph.capture(body)
        self._small_grads = [
            (small, param, grad, owes) for ((small, _), (param, _, owes)), grad in zip(smalls.items(), found)
        ]
        for static in self._inputs:
            static.grad = None
        self.graphs.append(graph)
        if writer.entries:
            self._capture_reductions(writer)
        self.is_captured = True
        return graph

    def _capture_reductions(self, writer: RingWriter) -> None:
        """Of what a graph of the backward leaves in the ring, into the gradients that stay."""

        def body() -> None:
            before = {member: member.param.grad for member in self._grads}
            try:
                for member, grad in self._grads.items():
                    member.param.grad = grad
                for weight, param, slot in writer.entries:
                    # The slot's memory is not to be given away.
                    weight.runtime.reducer.launch(weight, param, slot.memory, returned=False, is_borrowed=True)
                for runtime in self._runtimes:
                    runtime.finalize()
            finally:
                for member, grad in before.items():
                    member.param.grad = grad

        weights = [weight for weight, *_ in writer.entries]
        graph = Graph(self.owner, Part(tuple(dict.fromkeys(weights)), True, reduces=True))
        with torch.no_grad():
            graph.capture(body)
        self.graphs.append(graph)
        self._reduced = PendingReplay(self.owner.recorder.mark(), weights)

    # ---- replays

    def replay_forward(self, inputs: tuple[torch.Tensor, ...]) -> _Pass:
        """Leaves :attr:`outputs`."""
        for static, given in zip(self._inputs, inputs):
            static.data.copy_(given)
        self.graphs[0].give()
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
            in_flight = runtime.reducer.pending.in_flight
            if any(reduction.weight in self._grads for reduction in in_flight):  # into what may be moved now
                runtime.reducer.pending.receive()
        given = [grad for grad, trains in zip(grads, self.output_trains) if trains]
        for static, grad in zip(self._output_grads, given):
            static.zero_() if grad is None else static.copy_(grad)
        if self._reduced is not None:
            self._reduced.wait()
        self._bring_gradients()
        self.graphs[1].give()
        self._reduce()
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
        for member in self._grads:
            guard_gradient(member, member.param)
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

    def _reduce(self) -> None:
        """Give the stream beside this one the reductions of what the backward left in the ring."""
        reduced = self._reduced
        if reduced is None:
            return
        _, backward, reductions = self.graphs
        self.owner.recorder.beside(reductions.give, reduced.mark)
        for slot in backward.part.ring.slots:
            slot.reader = reduced
        reduced.is_given = True
        runtimes = dict.fromkeys(weight.runtime for weight in reductions.part.own)
        for runtime in runtimes:
            if reduced not in runtime.reducer.replays.in_flight:
                runtime.reducer.replays.add(reduced)
        if not all(runtime.config.async_reduction for runtime in runtimes):
            for runtime in runtimes:
                runtime.reducer.replays.receive()


def _is_watched(tensor: torch.Tensor | None) -> bool:
    """Whether its gradient goes to somebody beside autograd's graph."""
    return tensor is not None and (tensor.is_leaf or tensor.retains_grad or bool(tensor._backward_hooks))


def graphed_modules(model: nn.Module) -> list[str]:
    """FQNs of those whose forwards are, or will be, graphs."""
    modules = model.named_modules()
    return [clean_fqn(name) for name, m in modules if isinstance(m.__dict__.get("forward"), _GraphedForward)]


def _empty(leaf: Any) -> Any:
    """What a static input is made of, without the values."""
    return torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf


def _kind(leaves: list, tree: Any) -> tuple:
    described = tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )
    return described, str(tree), autocast_modes()
