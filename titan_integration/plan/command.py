"""The command line of the planner."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings as python_warnings
from collections.abc import Callable
from pathlib import Path

import torch

from gtp_dtensor import schedule_table
from gtp_dtensor.config import WIRE_FORMATS
from titan_integration.families import families
from titan_integration.settings import describe_gathers

from . import charts
from .arrangement import NUM_RECORDED, arrangement_of, configured, make_plan
from .calibrate import calibrate
from .checks import check_layout
from .cluster import Cluster, read_cluster
from .device import fake_world
from .rank import Rank, RankStep, build_rank, model_args_of, read_job
from .record import KINDS
from .report import as_json, details, explain, ranking_as_json, scaling_table, table, volume_line, warnings
from .search import Choices, Ranking, search, weak_scaling
from .wire_figures import summary


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_at_least(1), text.split(",")))


def _formats(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in WIRE_FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(WIRE_FORMATS)}")
    return tuple(text.split(","))


def parse(doc: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, torchtitan's)."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_integration.plan", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("toml", nargs="?", help="torchtitan TOML")
    parser.add_argument("--cluster", help="a cluster's TOML, or the name of one that is shipped")
    parser.add_argument("--world", type=_at_least(1), help="number of ranks (default: the cluster's)")
    parser.add_argument("--only", action="store_true", help="plan the TOML's own arrangement")
    parser.add_argument("--dry-run", action="store_true", help="build one rank and check its layout; needs no cluster")
    parser.add_argument(
        "--weak-scaling", type=_numbers, metavar="WORLDS", help="the TOML's own arrangement on 128,256,... ranks"
    )
    parser.add_argument("--rank", type=_at_least(0), default=0, help="which rank --dry-run builds")
    parser.add_argument(
        "--calibrate",
        type=Path,
        action="append",
        metavar="JSON",
        help="take rates from measurements; several: the first",
    )
    for name in ("tp", "gtp", "pp", "ep", "egtp"):
        parser.add_argument(f"--{name}", type=_numbers, help=f"degrees of {name} to look at, separated by commas")
    parser.add_argument(
        "--wire",
        type=_formats,
        default=(),
        help="wire formats to look at, such as bf16,mxfp8",
    )
    parser.add_argument("--top", type=_at_least(1), default=10, help="rows of the table")
    parser.add_argument(
        "--exact", type=_at_least(0), default=0, help="how many of the best are planned again with all layers"
    )
    parser.add_argument("--processes", type=_at_least(0), help="processes that plan (default: one a core; 0: this one)")
    parser.add_argument("--explain", action="store_true", help="say in words why the winner wins")
    parser.add_argument("--json", type=Path, help="file for all plans")
    parser.add_argument("--charts", type=Path, help="folder for PNG charts; needs matplotlib")
    known, rest = parser.parse_known_args(arguments)
    for option in rest:
        if option.startswith("-") and "." not in option.partition("=")[0]:
            parser.error(f"unknown option {option}")
    if known.toml is None and known.calibrate is None:
        parser.error("name a torchtitan TOML")
    if known.toml is not None and not Path(known.toml).is_file():
        parser.error(f"{known.toml}: no such file")
    if known.cluster is None and not known.dry_run:
        parser.error("name a cluster: --cluster FILE (with --dry-run none is needed)")
    return known, rest


def main(doc: str, arguments: list[str] | None = None) -> int:
    """0, or 2 where the files or options are wrong; 1 where no arrangement can run, or --dry-run finds a fault."""
    args, rest = parse(doc, sys.argv[1:] if arguments is None else arguments)
    logging.getLogger().setLevel(logging.WARNING)
    python_warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        cluster = None if args.cluster is None else read_cluster(args.cluster)
        if args.calibrate is not None:
            cluster, text = calibrate(cluster, args.calibrate)
            print(text)
            if args.toml is None:
                return 0
        job_config = read_job(args.toml, rest)
        if args.dry_run:
            world = args.world or (cluster.num_gpus if cluster else 1)
            if args.rank >= world:
                raise ValueError(f"--rank {args.rank}: there are {world} ranks")
            return dry_run(job_config, world, args.rank)
        check_outputs(args)
        world = args.world or cluster.num_gpus
        if args.weak_scaling:
            plans = weak_scaling(job_config, cluster, arrangement_of(job_config), args.weak_scaling)
            print(scaling_table(plans, cluster))
            if args.json is not None:
                args.json.write_text(json.dumps([as_json(plan, cluster) for plan in plans], indent=1))
            if args.charts is not None:
                print(f"wrote {charts.draw_weak_scaling(plans, cluster, args.charts)}", file=sys.stderr)
            return 0
        if args.only:
            return plan_own(job_config, cluster, world, args)
        return plan_all(job_config, cluster, world, args, rest)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def check_outputs(args: argparse.Namespace) -> None:
    """Before minutes of planning.

    Raises:
        FileNotFoundError, ImportError: --json or --charts could not be written.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no such folder")
    if args.charts is not None:
        charts.pyplot()


def dry_run(job_config, world: int, rank: int) -> int:
    """Builds one rank, makes its step, and reports memory, schedule and layout."""
    start = time.perf_counter()
    with fake_world(world, rank):
        built = build_rank(job_config, world)
        report = check_layout(built.parts)
        num_microbatches, batch = _batch(built, world)
        recorder = RankStep(built, min(num_microbatches, NUM_RECORDED)).record()
        rows = [row for part in built.parts for row in schedule_table(part)]
    peak = recorder.memory.peak()
    print(f"rank {rank} of {world}: {built.num_parameters:,} parameters, {arrangement_of(job_config)}")
    print(report)
    print(f"batch: {batch}")
    print(f"schedule: {len(rows)} uses a step. {describe_gathers(rows)}")
    print(f"memory at the peak of a step: {sum(peak.values()) / 1e9:.2f} GB")
    for kind in KINDS:
        print(f"  {kind:<16} {peak[kind] / 1e9:10.3f} GB")
    print(f"in {time.perf_counter() - start:.1f} s")
    return 1 if report.faults else 0


def _batch(built: Rank, world: int) -> tuple[int, str]:
    """(microbatches of a step outside of a pipeline, in words). Where they are several, gradients wait in memory."""
    job_config = built.job_config
    training = job_config.training
    samples = f"{built.tokens_per_microbatch // training.seq_len} x {training.seq_len:,} tokens"
    try:
        _, num_microbatches = configured(job_config, arrangement_of(job_config), world)
    except ValueError as error:
        return 1, f"one microbatch of {samples} is planned; training would refuse this batch: {error}"
    if built.schedule is not None:
        return 1, f"the pipeline's own microbatches of {samples}"
    return num_microbatches, f"{num_microbatches} microbatches of {samples} a step"


def _hidden(job_config) -> int:
    return model_args_of(families()[job_config.model.name], job_config).dim


def plan_own(job_config, cluster: Cluster, world: int, args: argparse.Namespace) -> int:
    """The TOML's own arrangement."""
    arrangement = arrangement_of(job_config)
    plan = make_plan(job_config, cluster, world, arrangement, keeps_timeline=True)
    print(details(plan, cluster))
    print(f"  on the wire: {volume_line(plan)}")
    print(f"  {summary(job_config, arrangement)}")
    print("\n".join(f"  {line}" for line in warnings(plan, job_config, _hidden(job_config))))
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(plan, cluster), indent=1))
    if args.charts is not None:
        ranking = Ranking(cluster, world)
        ranking.add(plan)
        _draw(job_config, ranking, plan, args)
    return 0


def plan_all(job_config, cluster: Cluster, world: int, args: argparse.Namespace, rest: list[str]) -> int:
    """Many arrangements."""
    choices = Choices(args.tp, args.gtp, args.pp, args.ep, args.egtp, args.wire)
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    num_processes = min(8, os.cpu_count() or 1) if args.processes is None else args.processes
    source = (num_processes, args.toml, rest) if num_processes else None
    ranking = search(job_config, cluster, world, choices, args.exact, source, tell)
    print(table(ranking, args.top))
    if args.explain:
        print()
        print(explain(ranking, job_config, _hidden(job_config)))
        if ranking.plans:
            best = ranking.plans[0]
            print(f"- {summary(job_config, best.arrangement)}.")
            print()
            print(details(best, cluster))
    if args.json is not None:
        args.json.write_text(json.dumps(ranking_as_json(ranking), indent=1))
    if args.charts is not None and ranking.plans:
        best = make_plan(job_config, cluster, world, ranking.plans[0].arrangement, keeps_timeline=True)
        _draw(job_config, ranking, best, args)
    return 0 if ranking.plans else 1


def _draw(job_config, ranking: Ranking, best, args: argparse.Namespace) -> None:
    for path in charts.draw(job_config, ranking, best, args.charts):
        print(f"wrote {path}", file=sys.stderr)
