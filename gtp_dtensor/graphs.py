"""A whole training step as one CUDA graph; see [Note: capture and replay] in graph_capture.py."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .graph_capture import CudaRecorder, Recorder, Runtimes, RuntimesReplay
from .graph_checks import (
    Gradients,
    GraphError,
    Held,
    HostReads,
    Places,
    Steppers,
    autocast_modes,
    check_optimizers,
    first_difference,
    hooked_parameters,
    host_numbers,
    named_hooks,
    refuse_written,
    setting_versions,
)
from .graph_python import Decisions, Names
from .graphed_block import graphed_modules
from .plan import clean_fqn

logger = logging.getLogger(__name__)
_LEAST_WARMUP_STEPS = 2  # the first one records the schedule, the second one runs it
_MOST_WARMUP_STEPS = 20  # beyond those that were asked for, while gathers are being timed


def graph_step(
    step: Callable[..., Any],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    num_warmup_steps: int = _LEAST_WARMUP_STEPS,
    max_graphs: int = 1,
    clone_outputs: bool = True,
) -> GraphedStep:
    """``step`` as one CUDA graph: forwards, backwards, reductions, clipping and optimizer, of any number of microbatches.

    Call what this returns in place of ``step``, with the same arguments; every call is one step. The first ones run as they
    are, as real steps on real batches; then one is captured, which computes nothing, and it and all later ones are replays.
    Results are those of running ``step`` itself, bit for bit where its kernels are deterministic. All ranks call alike. ::

        def step(tokens, labels):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm

        step = graph_step(step, model, optimizer)
        for tokens, labels in batches:
            loss, norm = step(tokens, labels)
        step.release()

    Python in ``step`` runs when it is captured, and never again: it must not read from the device, nor count, nor call a
    learning-rate scheduler. Whatever stands for a number in it keeps its value; a learning rate that changes has to be a
    tensor (``AdamW(lr=torch.tensor(1e-3, device="cuda"), capturable=True, fused=True)``), which schedulers write to.

    Args:
        step: of tensors, in any nesting of tuples, lists and dicts, and constants. Those in pinned memory of the CPU must
            not be written before they are copied, as with ``non_blocking=True``.
        model: whose weights it uses; under GTP in parts, as a whole, or not at all.
        optimizers: that it steps, all of them; none for an evaluation.
        num_warmup_steps: how many steps of each kind (shapes, constants, train or eval) run before one is captured. At
            least two, and more while ``look_ahead_bytes`` is being planned.
        max_graphs: how many kinds there may be. Each has a graph and its inputs, all share the memory that is used within.
        clone_outputs: else tensors that a call returns are overwritten by the next one.

    Raises:
        ValueError: an argument that cannot be served; the model is not on a GPU.
        GraphError: a later call cannot be captured or replayed; it names the module or tensor and the remedy. Nothing was
            computed then: run ``step`` itself on the same batch.
    """
    devices = {param.device for param in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "nowhere"
        raise ValueError(f"graph_step: CUDA graphs need a model on one GPU, and its parameters are on {found}")
    device = torch.device("cuda", torch.cuda.current_device())
    return GraphedStep(
        step,
        model,
        optimizers,
        recorder=CudaRecorder(device),
        device=device,
        num_warmup_steps=num_warmup_steps,
        max_graphs=max_graphs,
        clone_outputs=clone_outputs,
    )


class _Graph:
    """One captured step, with its inputs and outputs."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs: Any = None
        self.replay: Callable[[], None]
        self.runtimes: RuntimesReplay
        self.held: Held
        self.gradients: Gradients
        self.decisions: Decisions
        self.names: Names
        self.numbers: dict[tuple, Any] = {}


class GraphedStep:
    """What :func:`graph_step` returns.

    Attributes:
        eager: the step as it was given.
        num_graphs: captured so far and in use.
        num_replays: so far.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        recorder: Recorder,
        device: torch.device,
        num_warmup_steps: int,
        max_graphs: int,
        clone_outputs: bool,
    ) -> None:
        for name, value, least in (("num_warmup_steps", num_warmup_steps, 0), ("max_graphs", max_graphs, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"graph_step({name}={value!r}): must be an integer of at least {least}")
        self.eager = step
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._recorder = recorder
        self._device = device
        self._num_warmup_steps = max(num_warmup_steps, _LEAST_WARMUP_STEPS)
        self._max_graphs = max_graphs
        self._clone_outputs = clone_outputs
        self._runtimes = Runtimes(model)
        self._reads, self._steppers = HostReads(model), Steppers(self._optimizers)
        self._num_warmed: dict[tuple, int] = {}
        self._dropped: dict[tuple, set[str]] = {}  # whose gradients steps begin by dropping
        self._graphs: dict[tuple, _Graph] = {}
        self.num_replays = 0
        # Process groups cannot be destroyed while a graph holds their collectives.
        self._finalizer = weakref.finalize(self, recorder.release)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        leaves, tree = tree_flatten((args, kwargs))
        leaves = [self._here(leaf) for leaf in leaves]
        key = self._kind_of(leaves, tree)
        graph = self._graphs.get(key)
        if graph is not None and self._is_outdated(graph):
            graph = None
        if graph is None:
            if self._num_warmed.get(key, 0) < self._warmup_steps_of(key):
                return self._warm_up(key, leaves, tree)
            graph = self._capture(key, leaves, tree)
        return self._replay(graph, leaves)

    def reset(self) -> None:
        """Forget all graphs: the next calls warm up and capture anew."""
        for graph in self._graphs.values():
            graph.runtimes.forget()
        self._graphs.clear()
        self._num_warmed.clear()
        self._dropped.clear()
        self._reads.found.clear()
        self._steppers.found.clear()
        self._recorder.release()

    def release(self) -> None:
        """Free all graphs. To be called before process groups are destroyed, which waits for what graphs hold of them.
        Calls after it begin anew."""
        self.reset()

    # ---- what a call is

    def _here(self, leaf: Any) -> Any:
        """``leaf`` of the arguments, on the device."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.requires_grad:
            raise ValueError("a graphed step takes inputs that require no gradient: detach() them")
        return leaf.to(self._device, non_blocking=True) if leaf.device != self._device else leaf

    def _kind_of(self, leaves: list, tree: Any) -> tuple:
        """Steps of one kind share a graph."""
        described = tuple(
            (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in leaves
        )
        modes = (self._model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_modes())
        try:
            key = (described, str(tree), modes)
            hash(key)
        except TypeError as error:
            raise ValueError(
                f"a graphed step takes tensors and constants, and one argument is neither: {error}"
            ) from None
        return key

    def _warmup_steps_of(self, key: tuple) -> int:
        if key not in self._num_warmed:
            known = self._num_warmed.keys() | self._graphs.keys()
            if len(known) >= self._max_graphs:
                raise GraphError(
                    f"a step of {_shapes(key)}, and there are graphs, or steps to be captured, of "
                    f"{' and '.join(map(_shapes, known))}: each shape, constant and mode needs a graph of its own. Give "
                    f"graph_step(max_graphs={len(known) + 1}), pad the batch, or run this step without a graph"
                )
        num = self._num_warmup_steps
        done = self._num_warmed.get(key, 0)
        if done >= num and self._runtimes.takes_times:
            if done >= num + _MOST_WARMUP_STEPS:
                raise GraphError(
                    f"look_ahead_bytes, or time_next_step(), still takes times after {done} steps: steps differ from each "
                    "other. Use look_ahead= instead"
                )
            return done + 1
        return num

    def _is_outdated(self, graph: _Graph) -> bool:
        """Whether ``graph``, and all others with it, were forgotten since tensors are elsewhere now."""
        changed = graph.held.replaced() or graph.decisions.changed()
        if changed is None:
            return False
        logger.warning(
            "GTP: %s was changed, replaced, frozen or thawed since the step was captured: it is captured anew", changed
        )
        self.reset()
        return True

    # ---- warm-up, capture, replay

    def _warm_up(self, key: tuple, leaves: list, tree: Any) -> Any:
        num = self._num_warmed[key] = self._num_warmed.get(key, 0) + 1
        args, kwargs = tree_unflatten(leaves, tree)
        gradients = Gradients(self._model)
        watches = num == _LEAST_WARMUP_STEPS and self._device.type == "cuda"
        with self._recorder.apart():
            with self._steppers.watching(), self._reads.watching() if watches else contextlib.nullcontext():
                outputs = _detached(self.eager(*args, **kwargs))
            self._runtimes.settle()
        self._dropped.setdefault(key, set()).update(gradients.dropped())
        return outputs

    def _capture(self, key: tuple, leaves: list, tree: Any) -> _Graph:
        self._reads.refuse()
        self._steppers.refuse()
        blocks = graphed_modules(self._model)
        if blocks:
            raise GraphError(
                f"{blocks[0]}: a graph of graph_blocks(), which cannot be in the graph of a step: release() those first"
            )
        names = {id(param): clean_fqn(name) for name, param in self._model.named_parameters()}
        check_optimizers(self._optimizers, names)
        hooked = hooked_parameters(self._model)
        if hooked and not self._graphs:
            logger.warning("GTP: Python in gradient hooks of %s runs when the step is captured only", ", ".join(hooked))
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, tree)
        graph = _Graph([leaf for leaf in static if isinstance(leaf, torch.Tensor)])
        graph.held = Held(self._model, self._optimizers)
        graph.gradients = Gradients(self._model)
        graph.decisions = Decisions(self._model, self._optimizers)
        graph.names = Names(self.eager)
        given = [(tensor, tensor._version) for tensor in graph.inputs]
        graph.numbers = host_numbers(self._optimizers)
        versions = setting_versions(self._optimizers)
        schedules = self._runtimes.schedules()
        state = _OptimizerState(self._optimizers)

        graph.runtimes = RuntimesReplay(self._runtimes)

        def captured() -> Any:
            with self._runtimes.capturing(graph.runtimes), named_hooks(self._model):
                outputs = _detached(self.eager(*args, **kwargs))
            self._check_captured(graph, versions)
            refuse_written(given, "the step")
            return outputs

        def failed() -> None:
            self._runtimes.abandon(schedules)
            graph.gradients.restore()
            state.restore()
            graph.names.restore()
            graph.runtimes.forget()

        try:
            with self._recorder.apart():
                self._runtimes.settle()
                self._recorder.prepare()
                graph.replay, graph.outputs = self._recorder.capture(captured, failed)
        except GraphError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        graph.gradients.note_captured(self._dropped[key])
        graph.decisions.note_captured()
        self._graphs[key] = graph
        return graph

    def _check_captured(self, graph: _Graph, versions: dict[tuple, int]) -> None:
        """Raise :class:`GraphError` where the captured step changed what replays will not change."""
        changed = first_difference(graph.numbers, host_numbers(self._optimizers))
        if changed is None:
            changed = first_difference(versions, setting_versions(self._optimizers))
        if changed is not None:
            raise GraphError(
                f"the step changes {changed[0]} on the host, which its replays would not: call learning-rate schedulers outside "
                "of the step, and use an optimizer that keeps its state on the device"
            )
        replaced = graph.held.replaced()
        if replaced is not None:
            raise GraphError(
                f"the step puts another tensor in the place of {replaced}, or freezes it; its replays would go on reading the "
                "one before: write into it in place"
            )
        rebound = graph.names.changed()
        if rebound is not None:
            raise GraphError(
                f"the step makes {rebound[0]}, a variable around it, another one, and its replays would not: return the value, "
                "or write to a tensor in place; and count outside of the step"
            )

    def _explained(self, error: Exception) -> GraphError:
        where = Places(self._model).of_traceback(error.__traceback__)
        remedy = "run it without a graph, or leave that part out of it"
        if "get_state" in str(error) or "current_seed" in str(error) or "RNG" in str(error):
            remedy = "activation checkpointing has to be told preserve_rng_state=False"
        if any(told in str(error) for told in ("uncaptured work", "legacy stream", "stale reference")):
            # Nodes of autograd's graph that live on belong to the stream of their time.
            remedy = (
                "no loss of a step without a graph may be referenced any more, in a list say: keep loss.detach(); and the step may "
                "not name the default stream"
            )
        return GraphError(f"the step cannot be captured: {where}: {error}. Nothing of it was computed: {remedy}")

    def _replay(self, graph: _Graph, leaves: list) -> Any:
        changed = first_difference(graph.numbers, host_numbers(self._optimizers))
        if changed is not None:
            name, before, after = changed
            raise GraphError(
                f"{name} was {before!r} when the step was captured, and is {after!r}: the graph has the number. Where it "
                'changes, make it a tensor (lr=torch.tensor(..., device="cuda")), which schedulers write to; or call '
                "reset() to capture anew"
            )
        rebound = graph.names.changed()
        if rebound is not None:
            name, before, after = (rebound[0], *map(_short, rebound[1:]))
            raise GraphError(
                f"{name}, a variable around the step, was {before} when the step was captured, and is {after}: the graph has what "
                "it was. Where a number changes, give it as an argument, as a tensor; or call reset() to capture anew"
            )
        graph.gradients.check()
        for static, given in zip(graph.inputs, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))):
            static.copy_(given)
        graph.runtimes.step(graph.replay)
        graph.gradients.replayed()
        self.num_replays += 1
        if not self._clone_outputs:
            return graph.outputs
        return tree_map_only(torch.Tensor, torch.clone, graph.outputs)


class _OptimizerState:
    """What optimizers hold now, for after a capture that failed: in it nothing was computed, but Python ran."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._saved = [
            (o, {param: _copy(values) for param, values in o.state.items()}, [dict(group) for group in o.param_groups])
            for o in optimizers
        ]

    def restore(self) -> None:
        for optimizer, state, groups in self._saved:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups):
                group.update(before)


def _copy(values: Any) -> Any:
    return dict(values) if isinstance(values, dict) else values


def _short(value: Any) -> str:
    """For messages."""
    of_tensors = isinstance(value, (torch.Tensor, nn.Module, torch.optim.Optimizer))
    return f"one {type(value).__name__}" if of_tensors else repr(value)


def _detached(outputs: Any) -> Any:
    """Without the graphs of autograd, which hold activations and gathered weights."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def _shapes(key: tuple) -> str:
    """Of a kind of steps, for people."""
    described, _, (training, grad, *_) = key
    parts = [
        f"{tuple(entry[0])} {str(entry[1]).removeprefix('torch.')}"
        if isinstance(entry[0], torch.Size)
        else repr(entry[1])
        for entry in described
    ]
    mode = "train" if training else "eval"
    return f"inputs [{', '.join(parts)}] in {mode} mode{'' if grad else ' without gradients'}"
