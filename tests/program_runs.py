"""Runs a program sharded and whole, and compares: every output, gradient and weight must be equal bit for bit."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPStats, GTPStyle, finalize_grads, set_requires_gradient_sync, stats
from gtp_dtensor.members import STATE
from tests.programs import (
    BOUND,
    DIM,
    MAX_WIDTH,
    SAMPLE_ROWS,
    SAMPLES_PER_RANK,
    Aborted,
    Forward,
    Microbatch,
    Model,
    Program,
    Stack,
    run_stack,
)
from tests.reference import assert_equal_to_reference, full_gradients, full_parameters, local_slice, replica_options

# A weight that is used more often than this in a step may be mispredicted for ever: the schedule looks back only so
# far, and long runs of one weight look alike everywhere.
MAX_PREDICTED_REPEATS = 16


def _double_accumulated(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # torch calls the hook of a parameter that was frozen after the forward, too
        parameter.grad.mul_(2)


@dataclass
class Trace:
    """What a run showed: (name, value) in the order of events; values are tensors, or dicts of tensors by FQN."""

    values: list[tuple[str, torch.Tensor | dict]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, name: str, value: torch.Tensor | dict) -> None:
        """Record one value."""
        self.values.append((name, value))


class Run:
    """One run of a program, over a sharded model or over the whole one.

    Args:
        program: what to do.
        model: on which model.
        rank, num_peers: which slice of each global batch this run sees (0 of 1: all of it).
        num_samples: samples in a global batch.
    """

    def __init__(self, program: Program, model: Model, rank: int, num_peers: int, num_samples: int) -> None:
        self.program = program
        self.model = model
        self.rank, self.num_peers, self.num_samples = rank, num_peers, num_samples
        self.trace = Trace()
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, foreach=program.foreach)
        self._generator = torch.Generator().manual_seed(program.seed)
        for index, kind in program.hooks:
            parameter = self.parameters[index % len(self.parameters)]
            if not parameter.requires_grad:
                continue  # torch refuses
            if kind == "tensor":
                parameter.register_hook(lambda grad: grad * 2)
            else:
                parameter.register_post_accumulate_grad_hook(_double_accumulated)

    def after_backward(self) -> None:
        """Called when a backward has ended."""

    def after_abort(self) -> None:
        """Called when a backward has raised."""

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def expected_gradients(self) -> dict[str, torch.Tensor | None]:
        """Logical gradients, as the sharded run should have them."""
        return full_gradients(self.model)

    def _deal(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """This run's slice of a random global batch."""
        whole = torch.randint(low, high + 1, (self.num_samples, *shape), generator=self._generator)
        return local_slice(whole, self.rank, self.num_peers).clone()

    def before_step(self, number: int) -> None:
        """Called before each step."""

    def before_microbatch(self, is_last: bool) -> None:
        """Called before each microbatch of a step."""

    def after_microbatches(self) -> None:
        """Called after the last microbatch of a step."""

    def run(self) -> Trace:
        """Run all of it."""
        for number, step in enumerate(self.program.steps):
            self.before_step(number)
            for index in step.toggle:
                parameter = self.parameters[index % len(self.parameters)]
                parameter.requires_grad_(not parameter.requires_grad)
            for index, microbatch in enumerate(step.microbatches):
                self.before_microbatch(index == len(step.microbatches) - 1)
                self._microbatch(microbatch, f"step {number}")
            self.after_microbatches()
            self.trace.add(f"gradient of step {number}", self.expected_gradients())
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        grad = parameter.grad
                        (grad.to_local() if isinstance(grad, DTensor) else grad).sign_()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=step.set_to_none)
            self.trace.add(f"weight after step {number}", full_parameters(self.model))
        return self.trace

    def _microbatch(self, microbatch: Microbatch, where: str) -> None:
        losses, inputs = [], []
        self.model.abort_at, self.model.num_calls = microbatch.abort_at, 0
        for forward in microbatch.forwards:
            x = self._deal(-BOUND, BOUND, SAMPLE_ROWS, DIM).float()
            ids = self._deal(0, MAX_WIDTH, SAMPLE_ROWS)
            weight = self._deal(-2, 2, SAMPLE_ROWS, DIM)
            output = self._forward(forward, self._cast(x.requires_grad_(forward.input_grad)), ids)
            self.trace.add(f"output in {where} ({forward.mode})", output.detach().float())
            if forward.mode == "train" and output.requires_grad:
                losses.append((output.float() * weight).sum())
                inputs.append(x)
        for index in microbatch.freeze:
            self.parameters[index % len(self.parameters)].requires_grad_(False)
        try:
            for loss, retain in _backwards(microbatch.backward, losses):
                loss.backward(retain_graph=retain)
                self.after_backward()
        except Aborted:
            self.after_abort()
            self.optimizer.zero_grad()
            return
        for x in inputs:
            if x.grad is not None:
                self.trace.add(f"gradient of the input in {where}", x.grad)

    def _forward(self, forward: Forward, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mode = {
            "train": contextlib.nullcontext,
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
        }[forward.mode]
        self.model.train(forward.mode == "train")
        with mode():
            call = self.model if forward.through_root else self.model.walk
            return call(x, ids, forward.paths, torch.tensor(forward.selector))


def _backwards(order: str, losses: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
    """(loss, retain_graph) of each backward."""
    if not losses:
        return
    if order == "joint":
        yield sum(losses), False
    elif order == "twice":
        yield sum(losses), True
        yield sum(losses), False
    elif order in ("in_order", "reversed"):
        for loss in losses if order == "in_order" else losses[::-1]:
            yield loss, False
    else:
        raise ValueError(f"backward order {order!r}")


class WholeRun(Run):
    """The reference: the whole model on the whole batch."""

    def __init__(self, program: Program, num_peers: int) -> None:
        super().__init__(program, Model(program), 0, 1, num_peers * SAMPLES_PER_RANK)
        self._divisor = 1 if program.config.get("calculate_per_token_loss") else num_peers

    def expected_gradients(self) -> dict[str, torch.Tensor | None]:
        """Sums over the whole batch, or the average of what each peer has a sum of."""
        gradients = full_gradients(self.model)
        return {name: None if grad is None else grad / self._divisor for name, grad in gradients.items()}


def data_rank_of(program: Program, mesh) -> tuple[int, int]:
    """(which slice of the data this rank reads, of how many): tensor-parallel peers, the inner axis, read the same."""
    num_tp = 2 if program.has_tp else 1
    return mesh.get_local_rank() // num_tp, mesh.size() // num_tp


def _tp_plan(program: Program) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for index, unit in enumerate(program.units):
        if unit.kind == "pair":
            plan |= {f"units.{index}.first": ColwiseParallel(), f"units.{index}.second": RowwiseParallel()}
        elif unit.kind == "square":
            plan[f"units.{index}.first"] = ColwiseParallel(output_layouts=Replicate())
        elif unit.kind == "lookup":
            plan[f"units.{index}.first"] = RowwiseParallel(input_layouts=Replicate())
    return plan


def _shard(model: Model, program: Program, mesh) -> None:
    """Over all ranks of ``mesh``: (replicas, gtp, tp), those of them that the program has; experts over (dps, egtp)."""
    sizes = {program.replicas: 2} if program.replicas else {}
    sizes |= {"gtp": mesh.size() // (2 if program.has_tp else 1) // (2 if program.replicas else 1)}
    sizes |= {"tp": 2} if program.has_tp else {}
    grid = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if program.has_tp and (plan := _tp_plan(program)):
        parallelize_module(model, grid["tp"], plan)
    config, forwards = program.gtp_config(), {}
    has_experts = any(unit.kind == "experts" for unit in program.units)
    if has_experts and program.is_grouped:
        forwards = {Stack: run_stack}
    if has_experts and program.egtp:
        sparse = init_device_mesh(
            mesh.device_type, (mesh.size() // program.egtp, program.egtp), mesh_dim_names=("dps", "egtp")
        )
        names = [f"units.{index}.first" for index, unit in enumerate(program.units) if unit.kind == "experts"]
        options = dict(is_expert=True, modules=names, forwards=forwards, min_numel=program.min_numel)
        options |= dict(optimizer_shard_mesh=sparse["dps"], num_data_ranks=mesh.size())
        parallelize_module(model, sparse["egtp"], GTPStyle(config, **options))
        if len(names) == len(program.units):
            return
        forwards = {}
    style = GTPStyle(config, min_numel=program.min_numel, forwards=forwards, **replica_options(grid))
    parallelize_module(model, grid["gtp"], style)


class ShardedRun(Run):
    """The run under test. Also counts the uses of sharded weights by itself and holds ``stats`` against them."""

    def __init__(self, program: Program, mesh) -> None:
        model = Model(program)
        rank, num_peers = data_rank_of(program, mesh)
        _shard(model, program, mesh)
        super().__init__(program, model, rank, num_peers, num_peers * SAMPLES_PER_RANK)
        self._has_experts = any(unit.kind == "experts" for unit in program.units)
        self._uses = {"forward": 0, "recompute": 0, "backward": 0}
        self._aborted_at: int | None = None  # number of uses when the last aborted backward was left
        self._num_mispredictions = 0  # before the last step
        self._step_uses: Counter = Counter()  # forwards and recomputes of the present step by weight
        self._graph_uses = 0  # uses that each backward of the present microbatch will make
        self.num_turns = 0  # microbatches whose backwards begin with the weight that their forwards ended with
        self._turns_before = (0, 0)  # these, and how often a weight stayed there, before the last step
        self._newest: int | None = None  # what a forward ended with, if a backward can begin with it
        self._first: int | None = None  # what the backward of the present forward will begin with
        self._firsts: list[int] = []  # of each forward of the present microbatch
        for owner in [] if self._has_experts else model.weight_owners():
            if "weight" in owner.__dict__[STATE].weights:
                owner.register_forward_pre_hook(self._count_use)

    def _count_use(self, module: nn.Module, args: tuple) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        self._uses["recompute" if in_backward else "forward"] += 1
        self._step_uses[id(module._parameters["weight"])] += 1
        # Only a linear reads its weight again, for the gradient of its input.
        may_read_again = isinstance(module, nn.Linear) and torch.is_grad_enabled()
        weight = id(module._parameters["weight"]) if self.model.recompute == "none" else None
        if not in_backward:
            self._newest = weight if may_read_again else None
        if not may_read_again or not args[0].requires_grad:
            return
        if not in_backward:
            self._graph_uses += 1
            self._first = weight
        elif self.model.recompute == "reentrant":  # this pass builds the graph, the first one built none
            self._uses["backward"] += 1

    def _microbatch(self, microbatch: Microbatch, where: str) -> None:
        self._graph_uses, self._firsts = 0, []
        super()._microbatch(microbatch, where)
        if self._firsts:
            self.num_turns += self._firsts[0 if microbatch.backward == "in_order" else -1] == self._newest
        self._uses["backward"] += self._graph_uses * (2 if microbatch.backward == "twice" else 1)

    def _forward(self, forward: Forward, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self._first = None
        output = super()._forward(forward, x, ids)
        if forward.mode == "train" and output.requires_grad and self._first is not None:
            self._firsts.append(self._first)
        return output

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.program.gtp_config().param_dtype or x.dtype) if self.program.cast_input else x

    def after_backward(self) -> None:
        """Nothing is pending after a backward that synchronises gradients."""
        if not self._is_last_microbatch and self.program.syncs_last_only:
            return
        num_pending = stats(self.model).num_pending
        if self._has_experts and self._aborted_at is not None:
            return  # uses are not counted then
        # What an aborted backward left behind is dropped by the next use of any sharded weight.
        if num_pending and self._aborted_at != sum(self._uses.values()):
            self.trace.faults.append(f"{num_pending} reductions are pending after a backward")

    def after_abort(self) -> None:
        """How many uses an aborted backward made cannot be told from here; what is kept back, zero_grad does not reach."""
        self._aborted_at = sum(self._uses.values())
        if self.program.syncs_last_only:
            finalize_grads(self.model)

    def before_microbatch(self, is_last: bool) -> None:
        """Decide what its backward does with the replicas."""
        self._is_last_microbatch = is_last
        if self.program.syncs_last_only:
            late = [self.model.units[index] for index in self.program.late_units if index < len(self.model.units)]
            set_requires_gradient_sync(late or self.model, is_last)

    def after_microbatches(self) -> None:
        """The last of them may have had no backward."""
        if self.program.syncs_last_only:
            finalize_grads(self.model)

    def before_step(self, number: int) -> None:
        """Remember the counters of all but the last step."""
        seen = stats(self.model)
        self._num_mispredictions = seen.num_mispredictions
        self._turns_before = self.num_turns, seen.num_kept_at_turn
        self._step_uses.clear()

    def run(self) -> Trace:
        """Run all of it, then look at the counters."""
        trace = super().run()
        finalize_grads(self.model)
        if self.program.has_tp:
            # DTensor catches errors of its own under inference mode, whose tracebacks hold our frames and with them a
            # graph that saved gathered weights.
            gc.collect()
        self._check_counters(stats(self.model))
        return trace

    def _check_counters(self, seen: GTPStats) -> None:
        config = self.program.gtp_config()
        num_read = seen.num_prefetch_hits + seen.num_on_demand_gathers
        num_served = num_read + seen.num_kept_at_turn
        num_uses = sum(self._uses.values())
        num_gathers = seen.num_forward_gathers + seen.num_recompute_gathers + seen.num_backward_gathers
        # A weight kept from its recompute serves its backward use without another gather.
        most_kept = 0 if config.recompute_keep_bytes == 0 else min(self._uses["recompute"], self._uses["backward"])
        checks = {
            "no gather is left in memory": seen.live_lease_bytes == 0,
            "nothing is pending": seen.num_pending == 0,
        }
        if self._aborted_at is not None or self._has_experts:
            return self._report(checks, seen)
        checks |= {
            "every use is a hit, on demand, or kept": num_uses - most_kept <= num_served <= num_uses,
            "no use without a gather": num_gathers >= num_read,
        }
        if self.program.repeats_itself() and max(self._step_uses.values(), default=0) <= MAX_PREDICTED_REPEATS:
            new = seen.num_mispredictions - self._num_mispredictions
            checks["no misprediction in the last of equal steps"] = new == 0
            if not self._uses["recompute"]:
                turns = self.num_turns - self._turns_before[0], seen.num_kept_at_turn - self._turns_before[1]
                checks[f"what stays at turns of the last of equal steps: {turns}"] = turns[0] == turns[1]
        if not config.weight_prefetch:
            checks["gathers = uses"] = num_gathers == num_read and seen.num_prefetch_hits == 0
            checks["forward gathers = uses"] = seen.num_forward_gathers == self._uses["forward"]
            checks["recompute gathers = uses"] = seen.num_recompute_gathers == self._uses["recompute"]
        self._report(checks, seen)

    def _report(self, checks: dict[str, bool], seen: GTPStats) -> None:
        failed = [name for name, passed in checks.items() if not passed]
        if failed:
            self.trace.faults.append(f"not true: {', '.join(failed)}; counted {self._uses}, {seen}")


def differences(sharded: Trace, whole: Trace, rank: int, num_peers: int) -> list[str]:
    """What differs between the two runs, in the order of events; empty where nothing does."""
    found = list(sharded.faults)
    names, expected_names = ([name for name, _ in trace.values] for trace in (sharded, whole))
    if names != expected_names:
        return [*found, f"events {names}, the reference has {expected_names}"]
    for (name, actual), (_, expected) in zip(sharded.values, whole.values):
        if isinstance(expected, torch.Tensor):  # activations: this rank's slice
            expected = local_slice(expected, rank, num_peers)
        try:
            assert_equal_to_reference(actual, expected, name)
        except AssertionError as error:
            found.append(str(error))
    return found


def run_program(program: Program, mesh, tamper: str = "") -> list[str]:
    """Run a program on this rank, sharded over ``mesh`` (1-D) and whole, and compare.

    To replay a failing program: paste its repr, ``rank_pool.run(world_size, run_program, Program(...))``.

    Args:
        tamper: "swap", "skip_step" or "scale" breaks the sharded run on purpose, to see that it shows.

    Returns:
        What differs; empty if the program is right.
    """
    broken = program
    if tamper == "scale":
        per_token = not program.config.get("calculate_per_token_loss", False)
        broken = replace(program, config={**program.config, "calculate_per_token_loss": per_token})
    sharded = ShardedRun(broken, mesh)
    if tamper == "swap":
        one, other = (sharded.model.units[index].first.weight._local_tensor for index in (0, 1))
        one_before = one.clone()
        one.copy_(other)
        other.copy_(one_before)
    elif tamper == "skip_step":
        sharded.optimizer.step = lambda: None
    with warnings.catch_warnings():
        # Reentrant checkpointing of a segment without a gradient says so, in both runs.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        # First the reference: a program that torch itself refuses is the fault of the test.
        rank, num_peers = data_rank_of(program, mesh)
        expected = WholeRun(program, num_peers).run()
        trace = sharded.run()
    return differences(trace, expected, rank, num_peers)
