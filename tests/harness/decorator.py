"""``@ranks(...)``: a test function whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
from typing import Callable

import pytest

from tests.harness.report import RankFailure
from tests.harness.worker import INJECTED


def ranks(*world_sizes: int, timeout: float = 60.0, group_timeout: float = 30.0, device="cpu") -> Callable:
    """Run the body of a test on every rank, once for each world size.

    The body is an ordinary test function at the top level of its module. It may ask by name for ``rank``,
    ``world_size``, ``device`` and ``mesh`` (1-D, axis "gtp", all ranks); all its other parameters come from pytest
    (parametrization and fixtures; their values are pickled). Plain asserts, ``pytest.raises`` and ``pytest.skip``
    (on all ranks alike) work in the body::

        @ranks(2, 4)
        @pytest.mark.parametrize("bias", [False, True])
        def test_linear(mesh, rank, bias): ...

    Args:
        world_sizes: numbers of ranks.
        timeout: seconds for the whole test on one world size.
        group_timeout: seconds for one collective.
        device: "cpu", "cuda", or a tuple of both: one more parameter of the test. Tests on "cuda" are marked ``gpu``.
    """
    if not world_sizes or not all(isinstance(size, int) and size > 0 for size in world_sizes):
        raise TypeError(f"ranks{world_sizes}: give one or more world sizes, as in @ranks(2, 4)")
    devices = (device,) if isinstance(device, str) else tuple(device)

    def decorate(body: Callable) -> Callable:
        names = list(inspect.signature(body).parameters)
        passed = [name for name in names if name not in INJECTED]

        def test(rank_pool, world_size, rank_device, **values):
            failure = None
            try:
                rank_pool.run(
                    world_size,
                    body,
                    timeout=timeout,
                    group_timeout=group_timeout,
                    device=rank_device,
                    **values,
                )
            except RankFailure as error:
                failure = error
            if failure is not None:  # outside the handler, or pytest shows the report twice
                pytest.fail(str(failure), pytrace=False)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # pytest would ask for the body's parameters
        test.rank_body = body
        test.place_as = body  # where pytest says the test is
        test.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("rank_pool", "world_size", "rank_device", *passed)
        )
        gpu = {"cpu": (), "cuda": (pytest.mark.gpu,)}
        rank_devices = [pytest.param(name, marks=gpu[name], id=name) for name in devices]
        test = pytest.mark.parametrize("rank_device", rank_devices)(test)
        return pytest.mark.parametrize("world_size", world_sizes, ids=[f"{n}ranks" for n in world_sizes])(test)

    return decorate
