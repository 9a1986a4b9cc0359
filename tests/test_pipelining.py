"""torch's pipeline schedules over stages that GTP shards: pp 2 x gtp 2 beside one process with the whole model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from gtp_dtensor import GTPConfig, GTPStyle, clip_grad_norm_, count_zero_grads, finalize_grads, reset_stats, stats
from tests.harness import ranks
from tests.models import VOCAB, Block
from tests.reference import assert_close_to_reference, full_gradients, full_parameters, local_slice

NUM_MICROBATCHES, LENGTH, DIM, NUM_LAYERS = 4, 7, 16, 8


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch with the stages that each of two ranks holds."""

    cls: type
    stages: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))


SCHEDULES = {
    "1f1b": Schedule(Schedule1F1B, ((0,), (1,))),
    "interleaved": Schedule(ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "interleaved_zero_bubble": Schedule(ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "zbv_zero_bubble": Schedule(ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


class Layers(nn.Module):
    """Some of a model's layers, called by their number in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)  # the same weights in whichever stage a layer is
            if number == 0:
                layer = nn.Embedding(VOCAB, DIM)
            elif number == NUM_LAYERS - 1:
                layer = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=True))
            else:
                layer = Block(DIM, num_heads=4, num_kv_heads=2, hidden=40)
            self.layers[str(number)] = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64 (batch, LENGTH), or float (batch, LENGTH, DIM) -> float (batch, LENGTH, DIM or VOCAB)."""
        for layer in self.layers.values():
            x = layer(x)
        return x


class WeightGradients(TorchDispatchMode):
    """Counts matrix products whose result has the shape of a weight."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.num = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and tuple(out.shape) in self.shapes:
            self.num += 1
        return out


class Pipeline:
    """What one rank holds of the pipeline, and its schedule."""

    def __init__(self, schedule: Schedule, mesh, per_token: bool, num_tokens: int) -> None:
        self.mesh, self.per_token = mesh, per_token
        rank, size = mesh["pp"].get_local_rank(), schedule.num_stages
        per_stage = NUM_LAYERS // size
        config = GTPConfig(calculate_per_token_loss=per_token)
        self.parts = nn.ModuleList()
        for stage in schedule.stages[rank]:
            part = Layers(range(stage * per_stage, (stage + 1) * per_stage))
            self.parts.append(parallelize_module(part, mesh["gtp"], GTPStyle(config, min_numel=30)))
            part.register_forward_hook(self._note_forward)
        self.passes = {
            part: "" for part in self.parts
        }  # "F" and "B" (twice where weights come later) of the present step
        pp = mesh["pp"].get_group()
        stages = [
            PipelineStage(part, stage, size, torch.device("cpu"), group=pp)
            for part, stage in zip(self.parts, schedule.stages[rank])
        ]

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum" if per_token else "mean")
            return total / num_tokens if per_token else total

        one = stages[0] if schedule.cls is Schedule1F1B else stages
        # Mean mode is torch's default: it divides what the microbatches summed up by their number.
        self.schedule = schedule.cls(one, NUM_MICROBATCHES, loss_fn=loss, scale_grads=not per_token)
        self.is_first, self.is_last = 0 in schedule.stages[rank], size - 1 in schedule.stages[rank]

    def _note_forward(self, part: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self.passes[part] += "F"
        if output.requires_grad:
            output.register_hook(lambda grad: self._note_backward(part))

    def _note_backward(self, part: nn.Module) -> None:
        self.passes[part] += "B"

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forwards and backwards of this gtp rank's (batch, LENGTH). Returns the loss over all, on every rank."""
        self.passes = dict.fromkeys(self.parts, "")
        losses: list[torch.Tensor] = []
        targets = {"target": labels, "losses": losses} if self.is_last else {}
        self.schedule.step(*((tokens,) if self.is_first else ()), **targets)
        for part in self.parts:
            finalize_grads(part)
        total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total)
        return total if self.per_token else total / (NUM_MICROBATCHES * self.mesh["gtp"].size())

    def by_name(self, of) -> dict[str, torch.Tensor]:
        """Logical tensors of all stages here, by their names in the whole model."""
        return {name: value for part in self.parts for name, value in of(part).items()}


@ranks(4)
@pytest.mark.parametrize(
    "per_token", [pytest.param(True, marks=pytest.mark.slow, id="per_token"), pytest.param(False, id="mean")]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("zero_bubble")) for name in SCHEDULES]
)
def test_schedules_equal_one_process(name, per_token):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "gtp"))
    batch = 2 * 2 * NUM_MICROBATCHES
    reference = Layers(range(NUM_LAYERS))
    pipeline = Pipeline(SCHEDULES[name], mesh, per_token, num_tokens=batch * LENGTH)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, pipeline.parts)]
    linears = {tuple(p.shape) for p in reference.parameters() if p.dim() == 2 and p.shape != (VOCAB, DIM)}
    num_weights = stats(pipeline.parts).num_sharded_weights
    gtp_rank, pp = mesh["gtp"].get_local_rank(), mesh["pp"].get_group()
    num_steps = 4
    for step in range(num_steps):
        tokens, labels = torch.randint(VOCAB, (2, batch, LENGTH), generator=torch.Generator().manual_seed(step))
        expected_loss = F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten())
        expected_loss.backward()
        reset_stats(pipeline.parts)
        with WeightGradients(linears) as products:
            loss = pipeline.step(local_slice(tokens, gtp_rank, 2), local_slice(labels, gtp_rank, 2))
        assert_close_to_reference(loss, expected_loss.double(), f"loss of step {step}")
        expected = full_gradients(reference)
        gradients = pipeline.by_name(full_gradients)
        assert_close_to_reference(gradients, {one: expected[one] for one in gradients}, f"gradient of step {step}")
        check_counters(pipeline, products.num, num_weights, is_first=step == 0, is_last=step == num_steps - 1)
        num_zeros = count_zero_grads(pipeline.parts.parameters(), [pp])
        assert num_zeros == sum((grad == 0).sum() for grad in expected.values())
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        norm = clip_grad_norm_(pipeline.parts.parameters(), 0.5, groups=[pp])
        assert expected_norm > 0.5 and math.isclose(norm, expected_norm, rel_tol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected, weights = full_parameters(reference), pipeline.by_name(full_parameters)
        assert_close_to_reference(weights, {one: expected[one] for one in weights}, f"weight after step {step}")


def check_counters(pipeline: Pipeline, num_products: int, num_weights: int, is_first: bool, is_last: bool) -> None:
    """Each weight's gradient is computed and reduced once for each microbatch, zero bubble or not."""
    seen = stats(pipeline.parts)
    assert seen.num_reductions == NUM_MICROBATCHES * num_weights > 0
    num_tables = sum(isinstance(module, nn.Embedding) for module in pipeline.parts.modules())
    num_heads = sum(
        isinstance(module, nn.Linear) and module.out_features == VOCAB for module in pipeline.parts.modules()
    )
    assert num_products == NUM_MICROBATCHES * (num_weights - num_tables - num_heads)
    assert (seen.live_lease_bytes, seen.num_pending) == (0, 0)
    if not is_first:  # in the first step torch also runs every stage once to learn the shapes of activations
        assert seen.num_forward_gathers == NUM_MICROBATCHES * num_weights
    if is_last:
        assert seen.num_mispredictions == 0 < seen.num_prefetch_hits
        for part, passes in pipeline.passes.items():
            assert passes.count("F") == NUM_MICROBATCHES and passes.endswith("B")
            # A stage ends with a linear: it stays wherever a backward follows, of whichever microbatch.
            assert stats(part).num_kept_at_turn == passes.count("FB") > 0
        num_uses = NUM_MICROBATCHES * (num_weights - num_tables)
        assert seen.num_backward_gathers + seen.num_kept_at_turn == num_uses
