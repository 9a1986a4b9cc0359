"""The planner's clock, links, pipeline and files, by hand-made events: no model, no process group."""

import dataclasses
import math
from collections import Counter

import pytest

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from titan_integration.plan.arrangement import Arrangement, Plan, along, depths, with_one_more
from titan_integration.plan.calibrate import Measured, Predicted, fit
from titan_integration.plan.cluster import SHIPPED, read_cluster
from titan_integration.plan.network import demand, places
from titan_integration.plan.pipeline import StageTimes, pipeline_seconds
from titan_integration.plan.rank import Action
from titan_integration.plan.record import Kernel, Mark, Start, Sync, Wait
from titan_integration.plan.search import Ranking, memory_limit
from titan_integration.plan.simulate import kernel_seconds, occupancy, simulate

GB = 10**9


@pytest.fixture
def cluster():
    """Round numbers: 1 ms for each 10^9 operations, byte of memory or byte of a link; the host needs no time."""
    cluster = read_cluster("h200x8_infiniband")
    return dataclasses.replace(
        cluster,
        gpu=dataclasses.replace(cluster.gpu, bf16_tflops=1.0, fp8_tflops=2.0, memory_gb_s=1000.0),
        nvlink=dataclasses.replace(cluster.nvlink, bandwidth_gb_s=1000.0, latency_us=0.0, num_processors=0),
        network=dataclasses.replace(cluster.network, bandwidth_gb_s=100.0, latency_us=0.0),
        host=dataclasses.replace(cluster.host, launch_us=0.0, collective_us=0.0),
        efficiency=dataclasses.replace(
            cluster.efficiency, **dict.fromkeys(("gemm", "memory", "nvlink", "network"), 1.0)
        ),
    )


def gemm(ms):
    return Kernel("mm", int(ms * GB), 0, "bf16")


def send(number, ms, stream="gathers", ranks=(0, 1), weight="w"):
    """A transfer that alone takes so many milliseconds of NVLink: the ring of two moves half of it."""
    return Start(number, "all_gather", ranks, int(2 * ms * GB), stream, weight, "gtp", "gather forward")


def test_what_a_kernel_covers_is_not_exposed(cluster):
    events = [send(1, 3), gemm(4), Wait(1), gemm(1)]
    timeline = simulate(cluster, events)
    assert timeline.seconds == pytest.approx(5e-3) and timeline.exposed_s == 0
    events[0] = send(1, 6)
    timeline = simulate(cluster, events)
    assert timeline.seconds == pytest.approx(7e-3)
    assert timeline.exposed == {("w", "gather forward"): pytest.approx(2e-3)}
    assert timeline.compute_s == pytest.approx(5e-3)


def test_collectives_share_a_link_and_follow_each_other_on_a_stream(cluster):
    shared = [send(1, 2, "gathers"), send(2, 2, "reductions"), Wait(1), Wait(2)]
    assert simulate(cluster, shared).seconds == pytest.approx(4e-3)
    unequal = [send(1, 1, "gathers"), send(2, 3, "reductions"), Wait(1), Mark("first"), Wait(2)]
    timeline = simulate(cluster, unequal)
    assert timeline.marks["first"] == pytest.approx(2e-3) and timeline.seconds == pytest.approx(4e-3)
    timeline = simulate(cluster, [send(1, 2), send(2, 2), Wait(1), gemm(1), Wait(2)])
    assert timeline.seconds == pytest.approx(4e-3)
    ends = [end for span in timeline.spans if span.stream == "gathers" for end in (span.start, span.end)]
    assert ends == pytest.approx([0.0, 2e-3, 2e-3, 4e-3])
    # One on NVLink and one on the network do not meet. Ranks 0 and 8 are in two domains.
    far = [send(1, 2), send(2, 0.2, "reductions", ranks=(0, 8)), Wait(1), Wait(2)]
    assert simulate(cluster, far).seconds == pytest.approx(2e-3)


def test_a_collective_waits_for_what_was_issued_before_it(cluster):
    timeline = simulate(cluster, [gemm(2), send(1, 1), gemm(0.5), Wait(1)])
    assert timeline.seconds == pytest.approx(3e-3) and timeline.exposed_s == pytest.approx(0.5e-3)


def test_the_host_and_synchronisation_hold_the_device_up(cluster):
    cluster = dataclasses.replace(
        cluster, host=dataclasses.replace(cluster.host, launch_us=1000.0, collective_us=2000.0)
    )
    timeline = simulate(cluster, [gemm(0.1), gemm(0.1)])
    assert timeline.seconds == pytest.approx(2.1e-3) and timeline.host_bound_s == pytest.approx(1.9e-3)
    assert simulate(cluster, [send(1, 0.1), gemm(0.1), Wait(1)]).seconds == pytest.approx(3.1e-3)
    # After a synchronisation nothing is issued ahead.
    ahead = simulate(cluster, [gemm(5), gemm(0.1)]).seconds
    assert simulate(cluster, [gemm(5), Sync(), gemm(0.1)]).seconds == pytest.approx(ahead + 1e-3)


def test_collectives_in_flight_slow_gemms_and_nothing_else(cluster):
    taking = dataclasses.replace(cluster, nvlink=dataclasses.replace(cluster.nvlink, num_processors=33))  # a quarter
    timeline = simulate(taking, [send(1, 3), gemm(6), Wait(1)])
    assert timeline.seconds == pytest.approx(6.75e-3)  # three quarters of the rate for 3 ms
    copy = Kernel("copy_", 0, 6 * GB, "bf16")
    assert simulate(taking, [send(1, 3), copy, Wait(1)]).seconds == pytest.approx(6e-3)


def test_kernels_take_the_longer_of_operations_and_bytes(cluster):
    assert kernel_seconds(cluster, Kernel("mm", GB, 3 * GB, "bf16")) == pytest.approx(3e-3)
    assert kernel_seconds(cluster, Kernel("mm", 4 * GB, 3 * GB, "bf16")) == pytest.approx(4e-3)
    assert kernel_seconds(cluster, Kernel("mm", 4 * GB, 0, "fp8")) == pytest.approx(2e-3)
    assert occupancy((128 * 132, 256, 1, 4096), 132) == 1
    assert occupancy((128 * 133, 256, 1, 4096), 132) == pytest.approx(133 / 264)
    assert occupancy((128, 256, 1, 512), 132) == pytest.approx(1 / 132)
    assert occupancy((128, 256, 1, 8192), 132) == pytest.approx(8 / 132)  # eight share the inner dim


def test_links_of_rings(cluster):
    near, far = cluster.nvlink.bandwidth_gb_s * GB, cluster.network.bandwidth_gb_s * GB
    inside = demand(cluster, "all_gather", tuple(range(8)), 8 * GB)
    assert inside.nvlink_s == pytest.approx(7 * GB / near) and inside.network_s == 0
    assert demand(cluster, "all_reduce", tuple(range(8)), 8 * GB).nvlink_s == pytest.approx(14 * GB / near)
    # Two domains of eight: half of it comes from the other, over eight adapters.
    both = demand(cluster, "reduce_scatter", tuple(range(16)), 16 * GB)
    assert both.network_s == pytest.approx(1 * GB / far) and both.nvlink_s == pytest.approx(15 * GB / near)
    # Eight domains, one rank of each: one adapter for all.
    across = demand(cluster, "all_gather", tuple(range(0, 64, 8)), 8 * GB)
    assert across.network_s == pytest.approx(7 * GB / far) and across.nvlink_s == 0
    tokens = demand(cluster, "all_to_all", tuple(range(16)), 16 * GB)
    assert tokens.network_s == pytest.approx(8 * GB / far) and tokens.nvlink_s == pytest.approx(7 * GB / near)
    slow = dataclasses.replace(cluster, nvlink=dataclasses.replace(cluster.nvlink, latency_us=10.0))
    assert demand(slow, "all_gather", tuple(range(8)), 0).seconds == pytest.approx(40e-6)
    assert places((0, 1, 2, 3, 8), 8, 0) == (5, 1, 2)  # the domain with fewest adapters decides


def test_calibration_stays_near_the_data_sheet_where_measurements_do_not_tell():
    """GEMMs and kernels that move memory grow alike with the tokens: only their sum is measured, and the least change of
    the cluster file's fractions explains it. Attention grows with the square, and is told apart."""
    cluster = read_cluster("h200x8_infiniband")
    cluster = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, launch_us=0.0, collective_us=0.0))
    hidden = dataclasses.replace(
        cluster, efficiency=dataclasses.replace(cluster.efficiency, gemm=0.65, attention=0.5, memory=0.75)
    )
    used = []
    for tokens in (1, 4, 8):
        events = [
            Kernel("mm", tokens * 17 * 989 * GB, 0, "bf16"),
            Kernel("attention", tokens**2 * 989 * GB // 3, 0, "attention"),
            Kernel("add", 0, tokens * 8 * GB, "bf16"),
        ]
        step_ms = 1e3 * simulate(hidden, events).seconds
        used.append(Predicted(Measured({}, "gtp", tokens, step_ms, 0.0, 0.0, 0.0, 1), events, 0))
    # A step that the host nearly fills is held up by it, and tells little of the device.
    held_up_ms = 1.1 * used[0].row.step_ms
    used[0].row = dataclasses.replace(used[0].row, step_ms=held_up_ms, host_ms=0.95 * held_up_ms)
    fitted = fit(cluster, used)
    for one in used[1:]:
        assert simulate(fitted, one.events).seconds * 1e3 == pytest.approx(one.row.step_ms, rel=0.01)
    assert fitted.efficiency.gemm == pytest.approx(0.65, rel=0.05)
    assert fitted.efficiency.attention == pytest.approx(0.5, rel=0.1)
    assert 0.7 < fitted.efficiency.memory < 0.85


@pytest.mark.parametrize("num_microbatches, pp", [(8, 4), (4, 4), (16, 2)])
def test_a_pipeline_of_equal_stages_has_its_known_bubble(cluster, num_microbatches, pp):
    actions = {}
    for rank in range(pp):
        first = min(pp - 1 - rank, num_microbatches)
        order = [("forward", n) for n in range(first)]
        for n in range(num_microbatches - first):
            order += [("forward", first + n), ("backward", n)]
        order += [("backward", n) for n in range(num_microbatches - first, num_microbatches)]
        actions[rank] = [Action(kind, rank, n) for kind, n in order]
    times = [StageTimes({("forward", 0): 1.0, ("backward", 0): 2.0}, 0.0, 0.0)] * pp
    seconds = pipeline_seconds(cluster, actions, times, list(range(pp)), 0)
    assert seconds == pytest.approx(3.0 * (num_microbatches + pp - 1))
    # A transfer of 0.1 s is between all stages, there and back.
    slower = pipeline_seconds(cluster, actions, times, list(range(pp)), 100 * GB)
    assert slower >= seconds + 2 * (pp - 1) * 0.1 - 1e-9
    actions[0].reverse()
    with pytest.raises(RuntimeError, match="waits for itself"):
        pipeline_seconds(cluster, actions, times, list(range(pp)), 0)


def test_one_more_microbatch_has_transfers_of_its_own(cluster):
    def microbatch(number, first):
        return [Mark(f"forward {number}"), Wait(first), gemm(2), send(first + 1, 3), gemm(1)]

    head, tail = [send(1, 1)], [Wait(4), Mark("end")]
    three = [*head, *microbatch(0, 1), *microbatch(1, 2), *microbatch(2, 3), *tail]
    four = [*head, *microbatch(0, 1), *microbatch(1, 2), *microbatch(2, 3), *microbatch(3, 4), Wait(5), Mark("end")]
    grown = with_one_more(three)
    assert [e for e in grown if not isinstance(e, Mark)] == [e for e in four if not isinstance(e, Mark)]
    assert simulate(cluster, grown).seconds > simulate(cluster, three).seconds


def test_extrapolation_is_a_line():
    one, two = Plan(Arrangement(), 8, seconds=1.0), Plan(Arrangement(), 8, seconds=1.5)
    one.memory.update(activations=10, gathered=5)
    two.memory.update(activations=14, gathered=5)
    far = along(one, two, 10)
    assert far.seconds == 6.0 and far.memory == {"activations": 50, "gathered": 5}
    assert (
        depths(80, 1, 1, 1) == (2, 4)
        and depths(61, 4, 1, 1) == (4, 6)
        and depths(80, 1, 1, 4) == (8, 12)
        and depths(61, 4, 1, 4) == (16, 20)
    )
    assert depths(6, 4, 1, 1) is None
    # Of a pipeline each stage goes its own way, and the one that ends up largest counts.
    one.stages, two.stages = (
        (Counter(activations=9), Counter(activations=5)),
        (Counter(activations=10), Counter(activations=8)),
    )
    far = along(one, two, 10)
    assert far.stages == ({"activations": 19}, {"activations": 35}) and far.memory == {"activations": 35}


def test_what_does_not_fit_is_kept_apart(cluster):
    ranking = Ranking(cluster, 8)
    for gtp, share, seconds in ((2, 1.01, 1.0), (4, 0.99, 3.0), (8, 0.5, 2.0)):
        plan = Plan(Arrangement(gtp=gtp), 8, seconds=seconds, tokens=8)
        plan.memory["activations"] = share * memory_limit(cluster)
        ranking.add(plan)
    assert [plan.arrangement.gtp for plan in ranking.plans] == [8, 4]
    assert [plan.arrangement.gtp for plan in ranking.too_large] == [2]


def test_shipped_clusters_are_read():
    names = {path.stem for path in SHIPPED.glob("*.toml")}
    assert names == {"h200x8_infiniband", "gb200_nvl72", "workstation"}
    for name in names:
        cluster = read_cluster(name)
        assert 0 < cluster.ranks_per_domain <= cluster.nvlink.domain_size and not cluster.calibrated
    assert read_cluster("gb200_nvl72").ranks_per_domain == 64


@pytest.mark.parametrize(
    "old, new, field",
    [
        ("bf16_tflops = 989", "bf16_tflop = 989", "gpu.bf16_tflop; did you mean gpu.bf16_tflops"),
        ("memory_gb = 141", "", "field gpu.memory_gb is missing"),
        ("domain_size = 8", 'domain_size = "8"', "nvlink.domain_size = '8': must be an integer"),
        ("bandwidth_gb_s = 450", "bandwidth_gb_s = 0", "nvlink.bandwidth_gb_s = 0: must be above 0"),
        ("gemm = 0.75", "gemm = 75", "efficiency.gemm = 75.*at most 1"),
        ("[network]", "[net]", "unknown field net"),
        ("launch_us = 5", "launch_us = -5", "host.launch_us = -5: must be at least 0"),
        ("memory_gb_s = 4800", "memory_gb_s = nan", "gpu.memory_gb_s = nan: must be above 0, and finite"),
        ("gemm = 0.75", "gemm = nan", "efficiency.gemm = nan: must be above 0, and finite"),
        ("latency_us = 8", "latency_us = inf", "network.latency_us = inf: must be at least 0, and finite"),
        ("8 x H200", "\udcff", "not a TOML file"),
        ("num_gpus = 64", "num_gpus = true", "num_gpus = True: must be an integer"),
        ("domain_size = 8", "domain_size = 8\nranks_per_domain = 9", "nvlink.ranks_per_domain = 9 is more than"),
        ('name = "H200"', "name = 200", "gpu.name = 200: must be a string"),
        ("[gpu]", "[gpu", "not a TOML file"),
    ],
)
def test_a_bad_cluster_file_is_refused_by_field(tmp_path, old, new, field):
    text = (SHIPPED / "h200x8_infiniband.toml").read_text()
    assert text.count(old) >= 1
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(old, new, 1), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"cluster.toml: .*{field}"):
        read_cluster(str(file))
    with pytest.raises(FileNotFoundError, match="shipped are gb200_nvl72, h200x8_infiniband, workstation"):
        read_cluster(str(tmp_path / "nowhere.toml"))


def test_rates_of_the_shipped_clusters_give_finite_times():
    for path in SHIPPED.glob("*.toml"):
        cluster = read_cluster(path.stem)
        for what in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
            seconds = demand(cluster, what, tuple(range(0, 128, 2)), GB).seconds
            assert 0 < seconds < math.inf
