"""Tests that run on every rank of a world, not in pytest's process: ``@on_ranks(3)``."""

from collections.abc import Callable
from typing import Any

import pytest


class on_ranks(list[pytest.MarkDecorator]):
    """A decorator, or the ``pytestmark`` of a module whose tests all run on ranks; a test's own decorator comes first.

    Args:
        sizes: numbers of ranks. With several, the test runs with each; with none, its parameter ``size`` is the
            number.
        world: the fixture that provides the ranks: a world, or ``jobs``.
        around: a function of a module that gets the test and its arguments, and calls the test.
        options: options of the fixture's ``run``: for worlds ``init``, ``fresh``, ``kill``, ``deadline``, ``dying``;
            for ``jobs`` see there.
    """

    def __init__(
        self,
        *sizes: Any,
        world: str = "world",
        around: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        size = sizes[0] if len(sizes) == 1 else None
        super().__init__([pytest.mark.ranks(world, size, around, **options)])
        self.append(pytest.mark.usefixtures(world, *([] if size else ["size"])))
        if sizes[1:]:
            self.append(pytest.mark.parametrize("size", sizes))

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
    world, size, around = mark.args
    given = [pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames]
    call = [function for function in (around, pyfuncitem.obj) if function is not None]
    ranks = pyfuncitem.funcargs[world]
    ranks.run(size or pyfuncitem.funcargs["size"], *call, *given, **mark.kwargs)
    return True
