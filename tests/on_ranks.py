"""Tests that every rank of a world runs, in place of pytest's process: ``@on_ranks("nccl_world", 3)``."""

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["on_ranks", "pytest_pyfunc_call"]


class on_ranks(list[pytest.MarkDecorator]):
    """A decorator, or the ``pytestmark`` of a module whose tests all run on ranks.

    Args:
        world: the fixture that gives the ranks.
        size: how many there are; the test's parameter ``size`` if it is not given.
        around: a function of a module that is called with the test and its arguments, and calls it.
        kill: whether the ranks end with the test, which has changed what cannot be put back.
        options: of ``World.run``: ``init``, ``fresh``, ``deadline``, ``dying``.
    """

    def __init__(
        self,
        world: str,
        size: int | None = None,
        *,
        around: Callable[..., Any] | None = None,
        kill: bool = False,
        **options: Any,
    ) -> None:
        mark = pytest.mark.ranks(world, size, around, kill, **options)
        super().__init__([pytest.mark.usefixtures(world), mark])

    def __call__(self, test: Callable[..., None]) -> Callable[..., None]:
        for mark in self:
            test = mark(test)
        return test


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    world, size, around, kill = mark.args
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    ranks = pyfuncitem.funcargs[world](size or given["size"])
    call = [function for function in (around, pyfuncitem.obj) if function is not None]
    try:
        ranks.run(*call, *given.values(), **mark.kwargs)
    finally:
        if kill:
            ranks.kill()
    return True
