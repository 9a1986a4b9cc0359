"""Options, markers and fixtures of the test suite. Settings of pytest itself are in pyproject.toml."""

from __future__ import annotations

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.reference", "tests.programs", "tests.program_runs")

# Deterministic everywhere: the same examples in every run, and a printed line that reproduces a failing one.
_COMMON = {"derandomize": True, "print_blob": True, "deadline": None, "database": None, "report_multiple_bugs": False}
hypothesis.settings.register_profile("default-suite", max_examples=16, **_COMMON)
hypothesis.settings.register_profile("all", max_examples=500, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("gtp_dtensor")
    group.addoption("--all", action="store_true", help="also run tests marked slow, with more hypothesis examples")
    group.addoption("--world-limit", type=int, default=None, metavar="N", help="skip tests on more than N ranks")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the hypothesis profile."""
    limit = config.getoption("--world-limit")
    if limit is not None and limit < 1:
        raise pytest.UsageError(f"--world-limit {limit}: must be at least 1")
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "default-suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this run or this machine does not cover, with the reason."""
    skip_slow = pytest.mark.skip(reason="slow: runs with --all")
    skip_gpu = None
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(skip_slow)
        if item.get_closest_marker("gpu"):
            skip_gpu = skip_gpu or _skip_gpu()
            if skip_gpu is not None:
                item.add_marker(skip_gpu)


def _skip_gpu() -> pytest.MarkDecorator | None:
    import torch  # only runs that have tests for a GPU need to know

    return None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA GPU; torch finds none")


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest):
    """The pool of rank processes of this pytest run (``tests.harness.RankPool``)."""
    from tests.harness import RankPool

    pool = RankPool(world_limit=request.config.getoption("--world-limit"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def titan_jobs():
    """The process that forks the ranks of training jobs (``tests.titan_jobs.TitanJobs``)."""
    from tests.titan_jobs import TitanJobs

    with TitanJobs() as jobs:
        yield jobs
