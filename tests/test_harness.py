"""The harness itself: failures are reported with their cause, nothing hangs, nothing leaks into the next test."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import RankFailure, count_collectives, ranks

# ---- functions that run on ranks


def sum_of_ranks(rank, world_size, scale=1):
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return rank, world_size, total.item()


def assert_on_rank(bad_rank, rank):
    numbers = [rank, rank + 1]
    if rank == bad_rank:
        print("about to compare")
        assert numbers == [0, 0]
    dist.all_reduce(torch.zeros(1))


def raise_after_collective_partner_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def exit_on_rank(bad_rank, how, rank):
    if rank == bad_rank:
        print("leaving early", file=sys.stderr)
        if how == "os._exit":
            os._exit(7)
        sys.exit(3)
    dist.all_reduce(torch.zeros(1))


def miss_a_collective(rank):
    if rank != 1:
        dist.all_reduce(torch.zeros(1))


def miss_a_collective_of_a_new_group(rank):
    group = dist.new_group([0, 1])
    if rank != 1:
        dist.all_reduce(torch.zeros(1), group=group)


def sleep_on_rank(bad_rank, rank):
    if rank == bad_rank:
        time.sleep(600)


def skip_on_rank(rank, bad_ranks):
    if rank in bad_ranks:
        pytest.skip("not on this machine")


def return_a_lambda():
    return lambda: None


def leave_a_dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    TorchDispatchMode().__enter__()


_groups_of_earlier_tests: list = []


def make_and_keep_state(mesh, rank):
    """Touches everything that could leak, and keeps weak references to the groups."""
    weight = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    (weight @ weight.t()).full_tensor()
    groups = [mesh.get_group(), dist.group.WORLD, dist.new_group([0, 1])]
    _groups_of_earlier_tests.extend(weakref.ref(group) for group in groups)
    os.environ["GTP_HARNESS_LEAK"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.autograd.set_detect_anomaly(True)
    torch.set_default_device("meta")
    for _ in range(rank + 3):
        random.random(), np.random.rand(), torch.rand(3, device="cpu")
    return len(groups)


def look_for_state():
    gc.collect()
    return {
        "environ": os.environ.get("GTP_HARNESS_LEAK"),
        "dtype": torch.empty(1).dtype,
        "device": torch.empty(1).device.type,
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "draws": (random.random(), float(np.random.rand()), torch.rand(2).tolist()),
        "groups": sum(ref() is not None for ref in _groups_of_earlier_tests),
        "seen": len(_groups_of_earlier_tests),
    }


def full_matrix(mesh_shape, names):
    """A DTensor computation on a mesh that equals the previous test's mesh except for its process groups."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    weight = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)] * len(mesh_shape))
    product = weight @ weight.t()
    assert isinstance(product, DTensor)
    return product.full_tensor()


def group_timeouts():
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"].get_group()
    groups = [dist.group.WORLD, dist.new_group([0, 1, 2, 3]), rows]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def counted_traffic(rank, world_size):
    group = dist.new_group(list(range(world_size)))
    with count_collectives() as log:
        whole = torch.empty(4 * world_size, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, torch.ones(4, dtype=torch.bfloat16))
        dist.all_gather_into_tensor(whole, torch.ones(4, dtype=torch.bfloat16), async_op=True).wait()
        part = torch.empty(3)
        dist.reduce_scatter_tensor(part, torch.ones(3 * world_size), group=group)
        dist.all_reduce(torch.ones(5, dtype=torch.float64), group=group)
        dist.all_to_all_single(torch.empty(2 * world_size), torch.ones(2 * world_size))
        group.allreduce([torch.ones(7)]).wait()
    dist.all_reduce(torch.ones(1))  # outside the block: not counted
    assert (whole == 1).all() and (part == world_size).all()
    world = dist.group.WORLD
    return {
        "ops": [(call.op, call.is_async) for call in log.calls],
        "gather_bytes": log.num_bytes("all_gather", world),
        "gather_dtypes": log.dtypes("all_gather"),
        "reduce_bytes": log.num_bytes("reduce_scatter", group),
        "all_reduce": (log.count("all_reduce", group), log.count("all_reduce", world)),
        "all_to_all_bytes": log.num_bytes("all_to_all"),
        "ranks": {call.ranks for call in log.calls},
    }


def counted_dtensor_traffic(mesh):
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    with count_collectives() as log:
        weight.full_tensor()
    return [(call.op, call.num_bytes, call.group_name == mesh.get_group().group_name) for call in log.calls]


# ---- tests in pytest's process


def test_results_come_back_in_rank_order(rank_pool):
    assert rank_pool.run(3, sum_of_ranks, scale=2) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_processes_persist_over_runs_and_world_sizes(rank_pool):
    rank_pool.run(2, sum_of_ranks)
    before = rank_pool.process_ids(2)
    rank_pool.run(4, sum_of_ranks)
    rank_pool.run(1, sum_of_ranks)
    assert rank_pool.process_ids(4)[:2] == before


def test_failing_rank_is_reported_with_traceback_and_output_and_next_run_works(rank_pool):
    before = rank_pool.process_ids(2)
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(2, assert_on_rank, 1, grace=0.5)
    first, second = caught.value.faults
    assert (first.rank, first.what) == (1, "raised")
    report = str(caught.value)
    assert "assert [1, 2] == [0, 0]" in report  # rewritten: shows the values
    assert "in assert_on_rank" in report and "test_harness.py" in report
    assert "harness/worker.py" not in first.text  # the reader wants the test, not the harness
    assert "about to compare" in report
    assert (second.rank, second.what) == (0, "had to be killed while others failed")
    assert "all_reduce" in second.text  # where it was stuck
    assert rank_pool.run(2, sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert not set(before) & set(rank_pool.process_ids(2))


def test_every_failing_rank_is_listed(rank_pool):
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(3, return_a_lambda)
    assert sorted(fault.rank for fault in caught.value.faults) == [0, 1, 2]
    assert str(caught.value).count("(the same as rank") == 2


@pytest.mark.parametrize("how, what", [("os._exit", "ended with exit code 7"), ("sys.exit", "SystemExit: 3")])
def test_exit_is_reported(rank_pool, how, what):
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(2, exit_on_rank, 0, how, grace=0.5)
    assert caught.value.faults[0].rank == 0
    assert what in str(caught.value) and "leaving early" in str(caught.value)
    assert rank_pool.run(2, sum_of_ranks, scale=3) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_death_by_signal_comes_before_what_it_caused(rank_pool):
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(3, raise_after_collective_partner_dies)
    first, *others = caught.value.faults
    assert (first.rank, first.what) == (1, "killed by SIGKILL")
    assert {fault.rank for fault in others} == {0, 2}


def test_process_that_died_between_runs_is_replaced(rank_pool):
    victim = rank_pool.process_ids(2)[1]
    os.kill(victim, signal.SIGKILL)
    while os.path.exists(f"/proc/{victim}"):  # until its parent, the fork server, has noticed
        time.sleep(0.01)
    assert rank_pool.run(2, sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert victim not in rank_pool.process_ids(2)


@pytest.mark.parametrize("function", [miss_a_collective, miss_a_collective_of_a_new_group])
def test_hung_collective_is_cut_by_the_group_timeout(rank_pool, function):
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(2, function, group_timeout=0.5)
    assert (caught.value.faults[0].rank, caught.value.faults[0].what) == (0, "raised")
    assert "all_reduce" in caught.value.faults[0].text
    assert "finished without an error: rank(s) 1" in str(caught.value)


def test_hang_is_cut_by_the_test_timeout_and_shows_the_stack(rank_pool):
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(2, sleep_on_rank, 1, timeout=1.0)
    (fault,) = caught.value.faults
    assert (fault.rank, fault.what) == (1, "still running after 1 s")
    assert "in sleep_on_rank" in fault.text
    assert rank_pool.run(2, sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_skip_on_all_ranks_skips_and_on_some_fails(rank_pool):
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        rank_pool.run(2, skip_on_rank, bad_ranks=[0, 1])
    with pytest.raises(RankFailure, match="only some of the ranks skipped"):
        rank_pool.run(2, skip_on_rank, bad_ranks=[1])


def test_state_does_not_leak_into_the_next_test(rank_pool):
    clean = rank_pool.run(2, look_for_state)
    num_groups = rank_pool.run(2, make_and_keep_state)
    after = rank_pool.run(2, look_for_state)
    for before, later, num in zip(clean, after, num_groups):
        assert later["seen"] == before["seen"] + num  # the trap was armed in this very process
        assert later["groups"] == 0
        assert {**later, "seen": 0} == {**before, "seen": 0}
    assert clean[0]["draws"] == clean[1]["draws"]
    assert clean[0]["threads"] == 1 and clean[0]["dtype"] == torch.float32 and clean[0]["grad"]


def test_equal_meshes_of_successive_tests_do_not_share_groups(rank_pool):
    matrix = torch.arange(24.0).reshape(6, 4)
    for _ in range(2):
        for shape, names in (((2,), ("a",)), ((2, 2), ("a", "b")), ((4,), ("a",))):
            for product in rank_pool.run(int(np.prod(shape)), full_matrix, shape, names):
                assert torch.equal(product, matrix @ matrix.t())


def test_mode_left_active_is_reported(rank_pool):
    with pytest.raises(RankFailure, match="left 1 dispatch or function mode"):
        rank_pool.run(1, leave_a_dispatch_mode)
    rank_pool.run(1, sum_of_ranks)


def test_groups_made_by_the_code_under_test_have_the_timeout(rank_pool):
    assert rank_pool.run(4, group_timeouts, group_timeout=17.0) == [[17.0, 17.0, 17.0]] * 4


def test_what_cannot_run_on_ranks_is_refused_at_once(rank_pool):
    def local():
        pass

    for function in (local, lambda: None):
        with pytest.raises(TypeError, match="top level of a module"):
            rank_pool.run(2, function)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        rank_pool.run(2, sum_of_ranks, scale=lambda: None)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        rank_pool.run(2, sum_of_ranks, factor=2)
    with pytest.raises(ValueError, match="world_size=0"):
        rank_pool.run(0, sum_of_ranks)
    with pytest.raises(TypeError, match="give one or more world sizes"):
        ranks()


def test_collectives_are_counted_by_group_payload_and_dtype(rank_pool):
    for seen in rank_pool.run(2, counted_traffic):
        assert seen["ops"] == [
            ("all_gather", False),
            ("all_gather", True),
            ("reduce_scatter", False),
            ("all_reduce", False),
            ("all_to_all", False),
            ("all_reduce", True),
        ]
        assert seen["gather_bytes"] == 2 * 8 * 2
        assert seen["gather_dtypes"] == {torch.bfloat16}
        assert seen["reduce_bytes"] == 6 * 4
        assert seen["all_reduce"] == (2, 0)
        assert seen["all_to_all_bytes"] == 4 * 4
        assert seen["ranks"] == {(0, 1)}


def test_collectives_of_dtensor_are_counted(rank_pool):
    assert rank_pool.run(2, counted_dtensor_traffic) == [[("all_gather", 8 * 4 * 4, True)]] * 2


_POOL_THAT_HANGS = """
from tests.harness import RankPool
from tests.test_harness import sleep_on_rank

if __name__ == "__main__":
    pool = RankPool()
    print(*pool.process_ids(2), flush=True)
    pool.run(2, sleep_on_rank, 1, timeout=600)
"""


@pytest.mark.slow
def test_ranks_leave_when_pytest_is_killed(tmp_path):
    script = tmp_path / "pool_that_hangs.py"
    script.write_text(_POOL_THAT_HANGS)
    root = os.path.dirname(os.path.dirname(__file__))
    environ = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, script], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        process_ids = parent.stdout.readline().split()
        assert len(process_ids) == 2
        parent.kill()
    give_up = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{process_id}") for process_id in process_ids):
        assert time.monotonic() < give_up, "rank processes outlive pytest"
        time.sleep(0.05)


# ---- tests whose body runs on ranks


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_body_runs_on_every_rank(rank, world_size, device, mesh, dtype):
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert mesh.mesh_dim_names == ("gtp",) and mesh.size() == world_size and device.type == "cpu"
    ones = torch.ones(2, dtype=dtype)
    dist.all_reduce(ones, group=mesh["gtp"].get_group())
    assert ones.tolist() == [world_size, world_size]


@ranks(8)
def test_eight_ranks(rank, mesh):
    gathered = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    assert gathered.to_local().tolist() == [rank]


@ranks(2)
def test_fixtures_reach_the_body(tmp_path, rank):
    (tmp_path / f"rank{rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@ranks(2)
@pytest.mark.parametrize("number", range(50))
def test_fifty_trivial_tests(number, rank, world_size):
    total = torch.tensor(number + rank)
    dist.all_reduce(total)
    assert total.item() == world_size * number + 1


@ranks(2, device=("cpu", "cuda"))
def test_same_body_on_cpu_and_gpu(rank, world_size, device):
    parts = torch.full((3,), float(rank), device=device)
    whole = torch.empty(3 * world_size, device=device)
    dist.all_gather_into_tensor(whole, parts)
    assert whole.device.type == device.type
    assert whole.tolist() == [0.0] * 3 + [1.0] * 3
