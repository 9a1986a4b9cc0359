"""Random training programs: a small model and what is done with it. ``program_runs`` runs them.

Everything is an integer, so that float32, float64 and even bfloat16 arithmetic is exact and results must be equal bit
for bit: weights start in -1..1 and move by the sign of their gradient (at most ``MAX_STEPS`` times), activations and
the gradients of activations are bounded to -3..3 after each unit, and no sum has more than ``MAX_WIDTH`` terms. So
every matrix product stays below 256, the last integer up to which bfloat16 has them all. Weights stay below 16, up to
which float8 (e4m3) has them all, with a power of two as scale of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, grouped_linear
from tests.reference import fill_with_integers

DIM = 4  # features between units
MAX_WIDTH = 17
MAX_STEPS = 4
SAMPLE_ROWS = 2  # each sample is (SAMPLE_ROWS, DIM)
SAMPLES_PER_RANK = 2
BOUND = 3


@dataclass(frozen=True)
class Unit:
    """A map from (..., DIM) to (..., DIM).

    Attributes:
        kind: "square" (a linear), "pair" (two linears with ``rows`` features between them), "lookup" (adds rows of an
            embedding table of ``rows`` rows), "einsum" (uses a weight of its own directly) or "experts" (a stack of
            ``rows`` linears, each for its tokens).
        rows: see above.
        bias: whether the linears have biases.
    """

    kind: str
    rows: int = DIM
    bias: bool = False


@dataclass(frozen=True)
class Segment:
    """Units applied one after the other, recomputed together in the backward or not.

    ``recompute``: "none", "reentrant" or "nonreentrant".
    """

    units: tuple[int, ...]
    recompute: str = "none"


@dataclass(frozen=True)
class Forward:
    """One forward pass.

    Attributes:
        paths: what the data may choose from; units that are not on the path taken are skipped.
        selector: the choice; it reaches the model as a tensor that is the same on all ranks.
        mode: "train", "no_grad" or "inference".
        through_root: call the model, else a method of it that no hook sees.
        input_grad: whether the input requires a gradient.
    """

    paths: tuple[tuple[Segment, ...], ...]
    selector: int = 0
    mode: str = "train"
    through_root: bool = True
    input_grad: bool = False


@dataclass(frozen=True)
class Microbatch:
    """Forwards, and then their backwards.

    Attributes:
        forwards: one or two; those of mode "train" are followed by backwards.
        backward: "joint" (of the sum of losses), "in_order", "reversed" or "twice" (each with retain_graph, again).
        freeze: parameters (by index) frozen between forward and backward. Not with non-reentrant recomputation, which
            refuses (in torch) to save other tensors than the forward did.
        abort_at: the backward raises when it reaches the output of this unit call (counted over the microbatch's
            forwards); gradients are cleared then. None: it does not raise.
    """

    forwards: tuple[Forward, ...]
    backward: str = "joint"
    freeze: tuple[int, ...] = ()
    abort_at: int | None = None


@dataclass(frozen=True)
class Step:
    """Microbatches and an optimizer step.

    Attributes:
        toggle: parameters (by index) whose requires_grad changes before the step.
        microbatches: see :class:`Microbatch`.
        set_to_none: how gradients are cleared after the step.
    """

    microbatches: tuple[Microbatch, ...]
    toggle: tuple[int, ...] = ()
    set_to_none: bool = True


@dataclass(frozen=True)
class Program:
    """A model and what happens to it.

    Attributes:
        units: the model's units.
        ties: pairs (owner, other) of weights, by index in the order of ``Model.weight_owners``, of equal shape.
        frozen: parameters (by index) that start frozen.
        hooks: (parameter by index, "tensor" or "post_accumulate"): gradient hooks that double the gradient.
        steps: at most ``MAX_STEPS``.
        config: options of ``GTPConfig``; dtypes by name.
        min_numel: weights with fewer elements stay whole.
        foreach: the optimizer steps by foreach kernels, which leave no trace in a tensor's version counter.
        cast_input: the input reaches the sharded model in the dtype it computes in, else in float32.
        seed: of weights and data.
        replicas: "dps" or "dpr": half of the ranks are replicas of the other half, over which parameters are cut
            further, or copies.
        syncs_last_only: replicas are reached with the last microbatch of a step only.
        late_units: with ``syncs_last_only``: by the gradients of these units only, the others in each microbatch; empty: all.
        has_tp: half of the ranks beside the others are a tensor-parallel axis.
        egtp: stacks of experts lie on an axis of their own of so many ranks, the others being their replicas; 0: they are
            weights like others.
        is_grouped: stacks of experts are gathered for each product, by ``grouped_linear``; else by the general path.
    """

    units: tuple[Unit, ...]
    steps: tuple[Step, ...]
    ties: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()
    hooks: tuple[tuple[int, str], ...] = ()
    config: dict = field(default_factory=dict)
    min_numel: int = 1
    foreach: bool = False
    cast_input: bool = False
    seed: int = 0
    replicas: str = ""
    syncs_last_only: bool = False
    late_units: tuple[int, ...] = ()
    has_tp: bool = False
    egtp: int = 0
    is_grouped: bool = False

    def repeats_itself(self) -> bool:
        """Whether every step does the same."""
        step = self.steps[0]
        varies = step.toggle or any(microbatch.freeze for microbatch in step.microbatches)
        return len(self.steps) == MAX_STEPS and len(set(self.steps)) == 1 and not varies

    def gtp_config(self) -> GTPConfig:
        """The configuration of the sharded run."""
        dtypes = {name: getattr(torch, value) for name, value in self.config.items() if name.endswith("_dtype")}
        return replace(GTPConfig(), **{**self.config, **dtypes})


class Aborted(Exception):
    """Raised on purpose inside a backward."""


def _abort(grad: torch.Tensor) -> None:
    raise Aborted


class _Bounded(torch.autograd.Function):
    """Clamps values, and gradients by themselves, so that both stay small integers."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-BOUND, BOUND)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-BOUND, BOUND)


class Einsum(nn.Module):
    """Uses its own weight in an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., DIM) -> (..., DIM)."""
        weight = self.weight
        return torch.einsum("...i,oi->...o", x.to(weight.dtype), weight)


class Stack(nn.Module):
    """Square linears; each token goes through one of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.zeros(num_experts, DIM, DIM))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x (..., DIM), ids int64 (...) -> (..., DIM)."""
        weight = self.weight
        rows, order, splits = self.dispatch(x.to(weight.dtype), ids)
        parts = [part @ weight[expert].t() for expert, part in enumerate(rows.split(splits))]
        return self.combine(torch.cat(parts), order, x)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """(rows of one expert after the other, their places, how many each expert has)."""
        experts = ids.flatten() % self.num_experts
        order = experts.argsort(stable=True)
        return x.reshape(-1, DIM)[order], order, experts.bincount(minlength=self.num_experts).tolist()

    def combine(self, rows: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return torch.zeros_like(rows).index_copy(0, order, rows).view_as(x)


def run_stack(module: Stack, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The forward of :class:`Stack` for ``GTPStyle(forwards=...)``."""
    rows, order, splits = module.dispatch(x, ids)
    return module.combine(grouped_linear(module, "weight", rows, splits=splits), order, x)


class UnitModule(nn.Module):
    """The module of a :class:`Unit`."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.kind = unit.kind
        if unit.kind == "square":
            self.first = nn.Linear(DIM, DIM, bias=unit.bias)
        elif unit.kind == "pair":
            self.first = nn.Linear(DIM, unit.rows, bias=unit.bias)
            self.second = nn.Linear(unit.rows, DIM, bias=unit.bias)
        elif unit.kind == "lookup":
            self.first = nn.Embedding(unit.rows, DIM)
        elif unit.kind == "einsum":
            self.first = Einsum()
        elif unit.kind == "experts":
            self.first = Stack(unit.rows)
        else:
            raise ValueError(f"unit of kind {unit.kind!r}")

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x (..., DIM), ids int64 (...) -> (..., DIM)."""
        if self.kind == "lookup":
            return _Bounded.apply(x + self.first(ids % self.first.num_embeddings))
        x = _Bounded.apply(self.first(x, ids) if self.kind == "experts" else self.first(x))
        return _Bounded.apply(self.second(x)) if self.kind == "pair" else x


class Model(nn.Module):
    """The model of a program; the paths that a forward takes through its units come with the call."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.units = nn.ModuleList(UnitModule(unit) for unit in program.units)
        self.recompute = "none"  # of the segment that is running
        self.abort_at: int | None = None
        self.num_calls = 0
        owners = self.weight_owners()
        for owner, other in program.ties:
            owners[other].weight = owners[owner].weight
        fill_with_integers(self, -1, 1, program.seed)
        parameters = list(self.parameters())
        for index in program.frozen:
            parameters[index % len(parameters)].requires_grad_(False)

    def weight_owners(self) -> list[nn.Module]:
        """The modules that own a weight matrix, in order."""
        return [getattr(unit, name) for unit in self.units for name in ("first", "second") if hasattr(unit, name)]

    def forward(self, x, ids, paths, selector):
        """See :meth:`walk`."""
        return self.walk(x, ids, paths, selector)

    def walk(
        self, x: torch.Tensor, ids: torch.Tensor, paths: tuple[tuple[Segment, ...], ...], selector: torch.Tensor
    ) -> torch.Tensor:
        """x (samples, SAMPLE_ROWS, DIM) -> the same shape, along the path that ``selector`` (int64, 0-dim) chooses."""
        for segment in paths[int(selector)]:

            def run(x: torch.Tensor, ids: torch.Tensor, segment: Segment = segment) -> torch.Tensor:
                self.recompute = segment.recompute
                for index in segment.units:
                    x = self.units[index](x, ids)
                    if self.num_calls == self.abort_at and x.requires_grad:
                        x.register_hook(_abort)
                    self.num_calls += 1
                return x

            if segment.recompute == "none":
                x = run(x, ids)
            else:
                reentrant = segment.recompute == "reentrant"
                x = checkpoint(run, x, ids, use_reentrant=reentrant, preserve_rng_state=False)
        return x
