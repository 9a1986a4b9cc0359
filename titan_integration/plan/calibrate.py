"""Rates of a GPU and its host from what scripts/bench.py measured, and how far predictions then are from measurements.

[Note: calibration]
    Three measured steps calibrate, the others judge. Of a report in a fake world (one rank, no bytes move) these are
    steps of "gtp" with the fewest, a middle number and the most tokens, of the first report. The host's time for a
    launch and for a collective comes from their host times; which fractions of the peak rates GEMMs, attention and
    kernels that move memory reach are those that bring the three predicted times closest, by the logarithm, with the
    cluster file's values as a weak prior. A step counts by the part of it that its host time leaves to the device: where
    the host is busy nearly as long, it holds the device up here and there, as no sum of launches tells. Links keep the cluster file's rates: in a fake world nothing travels. Ranks
    that share a GPU judge memory only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gtp_dtensor.config import WIRE_FORMATS

from .cluster import Cluster, Efficiency
from .device import fake_world, meta_stands_for_gpu
from .record import COMPUTE_SHARDS, PARAMETERS, Event, Kernel, Recorder, Start
from .simulate import simulate
from .stack import Stack, shard_stack

_FITTED = ("gemm", "attention", "memory")
_PRIOR = 0.02  # weight of the cluster file's fractions beside the three measurements
_LEAST_SHARE = 0.05  # of a step that the host is busy for
_LEAST = 1e-6  # of a fraction: a CPU behind a GPU's data sheet
_NUDGE, _MOST_STEPS = -1e-3, 60  # of the logarithm of a fraction, downwards: none is above 1
_GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """One row of a report.

    Attributes:
        options: of bench.py.
        contestant: "none" or "gtp", with what it does otherwise.
        tokens: of a step.
        step_ms, host_ms: see bench.py; host_ms is None where it was not measured, which rows that calibrate need.
        peak_gib: allocated; 0 where it was not measured.
        host_us_per_use, num_uses: see bench.py.
    """

    options: Mapping
    contestant: str
    tokens: int
    step_ms: float
    host_ms: float | None
    peak_gib: float
    host_us_per_use: float | None
    num_uses: int

    @property
    def name(self) -> str:
        sizes = "x".join(str(self.options[key]) for key in ("layers", "dim", "ffn"))
        return f"{self.options['mode']} {self.contestant} {sizes}, {self.tokens} tokens"

    @property
    def device_share(self) -> float:
        """How much of the step is left to the device when the host has enqueued it: what the step tells of its rates."""
        return max(_LEAST_SHARE, 1 - (self.host_ms or 0.0) / self.step_ms)

    @property
    def shape(self) -> tuple:
        """What the model is made of."""
        return tuple(self.options[key] for key in ("layers", "dim", "ffn", "heads", "kv_heads"))


@dataclass
class Predicted:
    """Beside a measured row: a fresh recording, and what the calibrated cluster makes of it."""

    row: Measured
    events: list[Event]
    memory_bytes: float
    seconds: float = 0.0
    calibrates: bool = False

    @property
    def time_error(self) -> float | None:
        """Relative; None where time was not measured by this GPU alone."""
        return None if self.row.options["mode"] == "shared" else self.seconds * 1e3 / self.row.step_ms - 1

    @property
    def memory_error(self) -> float | None:
        return self.memory_bytes / _GIB / self.row.peak_gib - 1 if self.row.peak_gib else None


def read_rows(path: Path) -> list[Measured]:
    """The rows of a report of bench.py, or of several in one file, that can be planned.

    Raises:
        ValueError: the file is no such report; names what is missing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    reports = content.get("reports", [content]) if isinstance(content, dict) else []
    found = []
    for number, report in enumerate(reports):
        for key in ("options", "rows"):
            if key not in report:
                raise ValueError(f"{path}: report {number} has no {key!r}: it is not a report of scripts/bench.py")
        options = report["options"]
        for key in ("mode", "world", "layers", "dim", "ffn", "heads", "kv_heads", "look_ahead"):
            if key not in options:
                raise ValueError(f"{path}: report {number}: options.{key} is missing")
        for row in report["rows"]:
            missing = {"contestant", "tokens", "step_ms", "host_ms", "peak_allocated_gib", "num_uses"} - row.keys()
            if missing:
                raise ValueError(f"{path}: report {number}: a row has no {', '.join(sorted(missing))}")
            for key in ("tokens", "step_ms", "host_ms", "peak_allocated_gib", "num_uses"):
                _check_number(f"{path}: report {number}: {row['contestant']}: {key}", row[key], key)
            if _is_planned(row["contestant"]):
                names = ("contestant", "tokens", "step_ms", "host_ms", "peak_allocated_gib")
                values = (row[name] for name in names)
                found.append(Measured(options, *values, row.get("host_us_per_use"), row["num_uses"]))
    return found


def _check_number(what: str, value: object, key: str) -> None:
    if value is None and key == "host_ms":
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or not value and key in ("tokens", "step_ms"):
        raise ValueError(
            f"{what} = {value!r}: must be a number {'above' if key in ('tokens', 'step_ms') else 'from'} 0"
        )


def _is_planned(contestant: str) -> bool:
    name, *features = contestant.split("+")
    return name == "none" and not features or name == "gtp" and all(feature in WIRE_FORMATS for feature in features)


def record_stack(row: Measured) -> Predicted:
    """The step of bench.py's model that a row measured."""
    name, *features = row.contestant.split("+")
    world = row.options["world"] if row.options["mode"] == "fake" else row.options.get("num_ranks", 4)
    recorder = Recorder()
    with fake_world(world, 0), meta_stands_for_gpu():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("gtp",))
        with torch.device("meta"):
            model = Stack(*row.shape)
        if name == "gtp":
            shard_stack(model, mesh, features[0] if features else "auto", row.options["look_ahead"], "collective")
        else:
            model = model.bfloat16()
        model.to_empty(device="meta")

        def step() -> None:
            for param in model.parameters():
                param.grad = None
            x = torch.empty(1, row.tokens, row.options["dim"], dtype=torch.bfloat16, device="meta")
            model(x).backward(torch.empty_like(x))

        for _ in range(2):
            step()
        for param in model.parameters():
            param.grad = None
        recorder.memory.move((getattr(p, "_local_tensor", p) for p in model.parameters()), PARAMETERS)
        for weight in _weights(model):
            recorder.memory.move([weight._copy] if weight._copy is not None else [], COMPUTE_SHARDS)
            if weight.quantized is not None:
                parts = (part for parts in weight.quantized.parts.values() for part in parts)
                recorder.memory.move(parts, COMPUTE_SHARDS)
        with meta_stands_for_gpu(recorder), recorder:
            step()
    return Predicted(row, recorder.events, sum(recorder.memory.peak().values()))


def _weights(model: torch.nn.Module) -> list:
    from gtp_dtensor.members import model_members
    from gtp_dtensor.weight import ShardedWeight

    return [member for member in model_members(model) if isinstance(member, ShardedWeight)]


def calibrating(rows: Sequence[Measured]) -> list[Measured]:
    """The three that calibrate, see [Note: calibration].

    Raises:
        ValueError: there are fewer.
    """
    own = [row for row in rows if row.contestant == "gtp" and row.options["mode"] != "shared"]
    of_first = [row for row in own if row.shape == own[0].shape]
    of_first.sort(key=lambda row: row.tokens)
    if len(of_first) < 3:
        raise ValueError(
            "calibration needs three steps of 'gtp' of one shape and of different sizes (--tokens 1024,4096,8192), and "
            f"the file has {len(of_first)}"
        )
    chosen = [of_first[0], of_first[len(of_first) // 2], of_first[-1]]
    for row in chosen:
        if row.host_ms is None:
            raise ValueError(f"calibration needs host times, and {row.name!r} has none (scripts/bench.py --host-steps)")
    return chosen


def without_links(cluster: Cluster) -> Cluster:
    """Of a fake world, where nothing travels."""
    nvlink = dataclasses.replace(cluster.nvlink, bandwidth_gb_s=1e12, latency_us=0.0)
    network = dataclasses.replace(cluster.network, bandwidth_gb_s=1e12, latency_us=0.0)
    return dataclasses.replace(cluster, nvlink=nvlink, network=network)


def fit(cluster: Cluster, used: Sequence[Predicted]) -> Cluster:
    """``cluster`` with host times and fractions that explain these rows."""
    host = _fit_host(cluster, used)
    start = cluster.efficiency

    def with_fractions(logs: Sequence[float]) -> Cluster:
        values = {name: min(1.0, math.exp(value)) for name, value in zip(_FITTED, logs)}
        return dataclasses.replace(cluster, host=host, efficiency=dataclasses.replace(start, **values))

    prior = [math.log(getattr(start, name)) for name in _FITTED]
    weight = math.sqrt(_PRIOR / len(prior))

    def misses(logs: Sequence[float]) -> list[float]:
        candidate = without_links(with_fractions(logs))
        times = (simulate(candidate, one.events).seconds * 1e3 / one.row.step_ms for one in used)
        told = (one.row.device_share * math.log(time) for one, time in zip(used, times))
        return [*told, *(weight * (a - b) for a, b in zip(logs, prior))]

    # Where the host holds everything up small changes change nothing: first all fractions together.
    starts = ([value + shift for value in prior] for shift in range(0, int(math.log(_LEAST)), -1))
    return with_fractions(_least_squares(misses, min(starts, key=lambda logs: _squares(misses(logs)))))


def _squares(values: Sequence[float]) -> float:
    return sum(value**2 for value in values)


def _least_squares(misses: Callable[[Sequence[float]], list[float]], start: Sequence[float]) -> list[float]:
    """Where the sum of squares is least, by Levenberg's and Marquardt's steps. Steps along one axis at a time would end
    on the way: less time in GEMMs and more in memory is nearly the same to large steps of a model."""
    best, found, damping = list(start), misses(start), 1e-3
    for _ in range(_MOST_STEPS):
        moved = [misses([x + _NUDGE * (axis == at) for at, x in enumerate(best)]) for axis in range(len(best))]
        slopes = torch.tensor(moved, dtype=torch.float64).sub(torch.tensor(found, dtype=torch.float64)).div(_NUDGE)
        square = slopes @ slopes.T + damping * torch.eye(len(best), dtype=torch.float64)
        step = torch.linalg.solve(square, -slopes @ torch.tensor(found, dtype=torch.float64)).tolist()
        trial = [min(0.0, max(math.log(_LEAST), x + change)) for x, change in zip(best, step)]
        reached = misses(trial)
        gain = _squares(found) - _squares(reached)
        if gain > 0:
            best, found, damping = trial, reached, damping / 4
        else:
            damping *= 4
        if 0 < gain < 1e-10 or damping > 1e3:
            break
    return best


def _fit_host(cluster: Cluster, used: Sequence[Predicted]):
    """What a row's host time is more than that of the unsharded model is its collectives'; the rest its launches'."""
    launches, collectives = [], []
    for one in used:
        row = one.row
        num_kernels = sum(isinstance(event, Kernel) for event in one.events)
        num_started = sum(isinstance(event, Start) for event in one.events)
        added_ms = (row.host_us_per_use or 0.0) * row.num_uses / 1e3
        launches.append((row.host_ms - added_ms) * 1e3 / num_kernels)
        if num_started:
            collectives.append(added_ms * 1e3 / num_started)
    return dataclasses.replace(
        cluster.host,
        launch_us=max(0.0, statistics.median(launches)),
        collective_us=max(0.0, statistics.median(collectives)) if collectives else cluster.host.collective_us,
    )


def calibrate(cluster: Cluster, paths: Sequence[Path]) -> tuple[Cluster, str]:
    """(the cluster with measured rates, a report of the errors). The first file calibrates.

    Raises:
        ValueError: see :func:`read_rows` and :func:`calibrating`.
    """
    rows = [row for path in paths for row in read_rows(path)]
    chosen = calibrating(rows)
    predicted = [record_stack(row) for row in rows]
    for one in predicted:
        one.calibrates = any(one.row is row for row in chosen)
    fitted = fit(cluster, [one for one in predicted if one.calibrates])
    fitted = dataclasses.replace(fitted, calibrated=paths[0].name)
    for one in predicted:
        one.seconds = simulate(without_links(fitted), one.events).seconds
    return fitted, errors(fitted, predicted)


def errors(cluster: Cluster, predicted: Sequence[Predicted]) -> str:
    """Predicted against measured, a Markdown table."""
    efficiency: Efficiency = cluster.efficiency
    lines = [
        f"calibrated: launch {cluster.host.launch_us:.1f} us, collective {cluster.host.collective_us:.1f} us; of the "
        f"peak rates GEMMs reach {efficiency.gemm:.3g}, attention {efficiency.attention:.3g}, memory "
        f"{efficiency.memory:.3g}",
        "",
        "| | step, ms | predicted | error | peak, GiB | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(predicted, key=lambda one: not one.calibrates):
        row, time_error, memory_error = one.row, one.time_error, one.memory_error
        times = (
            "| | | |" if time_error is None else f"| {row.step_ms:.1f} | {one.seconds * 1e3:.1f} | {time_error:+.1%} |"
        )
        peak = (
            " | | |"
            if memory_error is None
            else f" {row.peak_gib:.2f} | {one.memory_bytes / _GIB:.2f} | {memory_error:+.1%} |"
        )
        lines.append(f"| {row.name}{' (calibrates)' if one.calibrates else ''} {times}{peak}")
    judged = [one for one in predicted if not one.calibrates]
    lines.append("")
    for what, found in (
        ("time", [abs(one.time_error) for one in judged if one.time_error is not None]),
        ("memory", [abs(one.memory_error) for one in judged if one.memory_error is not None]),
    ):
        if found:
            text = f"median error {statistics.median(found):.1%}, largest {max(found):.1%}"
            lines.append(f"{what}: {text}, of {len(found)} that did not calibrate")
        else:
            lines.append(f"{what}: nothing to judge by")
    return "\n".join(lines)
