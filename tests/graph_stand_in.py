"""A stand-in for CUDA graphs on a CPU: a capture leaves no trace in tensors, a replay computes and leaves none in Python.

What is replayed is the step itself, run again on the graph's own inputs; what its Python did is undone each time, and what
it computed is written to where the capture had put it. So a test sees whether the library does on its own what Python would
have done.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gtp_dtensor.graphs import GraphedStep
from gtp_dtensor.members import model_runtimes


def _local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class StandIn:
    """See ``gtp_dtensor.graph_capture.Recorder``.

    Attributes:
        num_released: how often :meth:`release` was called.
        in_capture: called with the stand-in within a capture, after the step.
    """

    def __init__(self, model, optimizers, step):
        self.model, self.optimizers, self._step = model, optimizers, step
        self._args = None
        self._is_capturing = False
        self.num_released = 0

        @functools.wraps(step)
        def given(*args, **kwargs):
            if self._is_capturing:
                self._args = args, kwargs
            return self._step(*args, **kwargs)

        self.step = given  # what a GraphedStep is given

    @contextlib.contextmanager
    def apart(self):
        yield

    def prepare(self):
        pass

    def _tensors(self):
        params = [_local(param) for param in self.model.parameters()]
        grads = [_local(param.grad) for param in self.model.parameters() if param.grad is not None]
        states = [_local(t) for o in self.optimizers for t in tree_leaves(list(o.state.values())) if _is_tensor(t)]
        copies = [w._copy for r in model_runtimes(self.model) for w in r.live_weights() if w._copy is not None]
        return params + grads + states + copies

    def capture(self, step, failed):
        self._is_capturing = True
        saved = [(tensor, tensor.clone()) for tensor in self._tensors()]
        weights = [weight for runtime in model_runtimes(self.model) for weight in runtime.live_weights()]
        rewritten = [weight for weight in weights if weight.compute_shard is None]
        try:
            outputs = step()
        except BaseException:
            self._undo(saved)
            failed()
            raise
        finally:
            self._is_capturing = False
        self._undo(saved)
        grads = [param.grad for param in self.model.parameters()]
        args, kwargs = self._args

        def replay():
            with self._python_undone():
                for weight in weights:  # a graph does what it did, whatever Python knows by now
                    if weight in rewritten:
                        weight.distrust_copy()
                    else:
                        weight._remember_versions()
                        weight.compute_shard = weight.compute_shard if weight._copy is None else weight._copy
                found = self._step(*args, **kwargs)
                for output, new in zip(tree_leaves(outputs), tree_leaves(found)):
                    if _is_tensor(output):
                        output.copy_(new.detach())
                for param, grad in zip(self.model.parameters(), grads):
                    if grad is not None and param.grad is not grad:
                        _local(grad).copy_(_local(param.grad))

        return replay, outputs

    @staticmethod
    def _undo(saved):
        with torch.no_grad():
            for tensor, before in saved:
                tensor.data.copy_(before)

    @contextlib.contextmanager
    def _python_undone(self):
        runtimes = model_runtimes(self.model)
        kept = []
        for runtime in runtimes:
            kept.append(
                (runtime.schedule, runtime.schedule.state(), runtime.counters, runtime.counters.peak_lease_bytes)
            )
        counters = [
            (c, {name: getattr(c, name) for name in type(c).__slots__})
            for r in runtimes
            for c in (r.counters, *(w.counters for w in r.live_weights()))
        ]
        writes = [(w, w.num_writes, w.generation, w.compute_shard) for r in runtimes for w in r.live_weights()]
        grads = [(param, param.grad) for param in self.model.parameters()]
        yield
        for schedule, state, *_ in kept:
            schedule.restore(state)
        for one, values in counters:
            for name, value in values.items():
                setattr(one, name, value)
        for weight, weight.num_writes, weight.generation, weight.compute_shard in writes:
            pass
        for param, grad in grads:
            param.grad = grad

    def release(self):
        self.num_released += 1


class _Mark:
    """Waiting for it does what was put off until then."""

    def __init__(self, stand_in):
        self._stand_in = stand_in

    def wait(self):
        self._stand_in.catch_up(self)


class BlockStandIn:
    """The same for graphs of blocks: what is replayed is the captured function itself, run again.

    What is to run beside other graphs runs as late as it may: when somebody waits for it.

    Args:
        chance: of a number, the same on all ranks: sometimes a part of it runs sooner.

    Attributes:
        put_off: (what, its mark), in order.
        num_beside: of these, so far.
    """

    def __init__(self, model, chance=None):
        self.model = model
        self._chance = chance
        self.num_released = self.num_beside = 0
        self.put_off = []

    @contextlib.contextmanager
    def apart(self):
        yield

    def prepare(self):
        pass

    def mark(self):
        return _Mark(self)

    def beside(self, work, done):
        self.num_beside += 1
        self.put_off.append((work, done))
        if self._chance is not None:
            place = self._chance.randrange(2 * len(self.put_off))
            if place < len(self.put_off):
                self.catch_up(self.put_off[place][1])

    def catch_up(self, mark=None):
        """Do what was put off, up to ``mark`` if that is given."""
        while self.put_off and (mark is None or any(done is mark for _, done in self.put_off)):
            work, _ = self.put_off.pop(0)
            work()

    def capture(self, step, failed, is_beside=False):
        grads = [_local(param.grad) for param in self.model.parameters() if param.grad is not None]
        saved = [(grad, grad.clone()) for grad in grads]
        told = [(runtime, runtime.schedule.state(), runtime._starts_pass) for runtime in model_runtimes(self.model)]
        try:
            result = step()
        except BaseException:
            failed()
            raise
        StandIn._undo(saved)

        def replay():
            with self._python_undone():
                for runtime, state, starts_pass in told:  # a graph gathers what it did, whatever is predicted by now
                    runtime.schedule.restore({name: copy.copy(value) for name, value in state.items()})
                    runtime._starts_pass = starts_pass
                found = step()
            for old, new in zip(tree_leaves(result), tree_leaves(found)):
                if _is_tensor(old):
                    old.data.copy_(new)

        return replay, result

    @contextlib.contextmanager
    def _python_undone(self):
        runtimes = model_runtimes(self.model)
        kept = [(r, r.schedule.state(), r.reducer.small, r._starts_pass, r._kept_bytes) for r in runtimes]
        leases = [(w, w.next_lease, w.kept_lease) for r in runtimes for w in r.live_weights()]
        in_flight = [(stage.in_flight, list(stage.in_flight)) for r in runtimes for stage in r.reducer._stages]
        backwards = [(r._backwards, dict(r._backwards)) for r in runtimes]
        for runtime in runtimes:
            runtime.reducer.small = {}
        for weight, *_ in leases:
            weight.next_lease = weight.kept_lease = None
        for table, _ in (*in_flight, *backwards):
            table.clear()
        with torch.enable_grad():
            yield
        for runtime, schedule, small, starts_pass, kept_bytes in kept:
            runtime.schedule.restore(schedule)
            runtime.reducer.small, runtime._starts_pass, runtime._kept_bytes = small, starts_pass, kept_bytes
        for weight, weight.next_lease, weight.kept_lease in leases:
            pass
        for stage, reductions in in_flight:
            assert not stage
            stage.extend(reductions)
        for table, ends in backwards:
            table.clear()
            table.update(ends)

    def release(self):
        self.catch_up()
        self.num_released += 1


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


def graphed(step, model, *optimizers, **options):
    """(a GraphedStep over the stand-in, the stand-in)."""
    stand_in = StandIn(model, optimizers, step)
    settings = {"num_warmup_steps": 2, "max_graphs": 1, "clone_outputs": True, **options}
    device = torch.device("cpu")
    return GraphedStep(stand_in.step, model, optimizers, recorder=stand_in, device=device, **settings), stand_in
