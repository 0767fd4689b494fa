"""Rules for every test: its tier, the reasons to skip it, its time limit.

``make test`` runs the tests not marked ``full``; each may take ``LIMIT`` seconds on an idle machine.
``make test-all`` runs everything. A test may be skipped only for a reason of ``SKIPS``. Any other reason
fails it, so a missing tool is noticed.
"""

import itertools
import os
import re
import time
from collections.abc import Callable

import pytest
from _pytest.mark.expression import Expression
from pauses import Pauses

LIMIT = float(os.environ.get("FASTCOLL_TEST_SECONDS", "5"))
"""Seconds that an item not marked ``full`` may take on an idle machine."""

SKIPS = (
    r"torch finds no CUDA device",
    r"needs a CUDA device",
    r"beyond gloo: ",
    r"gloo skips it too: ",
    r"the fault has its verdict$",
    r"gloo fails it: ",
    r"torch has its own NCCL here",
    r"torch 2\.\d+ has no ",
)
"""Patterns of the allowed reasons to skip a test."""

TOOLS = (r"needs root: ", r"needs spin: ", r"needs iproute2: ", r"needs two cores: ")
"""Patterns of further reasons on a developer's machine. In CI (variable CI) such a skip fails."""


_pauses: Pauses | None = None  # set in a test process, not in its ranks
_paused_before = 0.0  # seconds of pauses before the running test


def watch_pauses() -> None:
    """Start counting how long the machine stands still."""
    global _pauses
    _pauses = Pauses()
    _pauses.start()


def paused() -> float:
    """Returns how many seconds the machine has stood still in the running test."""
    return _pauses.seconds - _paused_before if _pauses else 0.0


def pytest_runtest_setup() -> None:
    global _paused_before
    _paused_before += paused()


def slack() -> float:
    """Returns the factor of every time limit that a test asserts: FASTCOLL_TEST_SLACK, 4 by default."""
    return float(os.environ.get("FASTCOLL_TEST_SLACK", "4"))


def bound(seconds: float) -> float:
    """Returns a time limit: ``seconds`` on an idle machine, ``slack()`` times as much in the suite.

    The seconds for which the whole machine stood still are added.
    """
    return seconds * slack() + paused()


def until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds that another thread of this process, or another rank, brings about."""
    end = time.monotonic() + bound(15)
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.002)


def is_gpu_run(expression: str) -> bool:
    """Returns whether ``pytest -m expression`` selects only items marked ``gpu``."""
    if not expression:
        return False
    compiled = Expression.compile(expression)
    others = sorted(set(re.findall(r"\w+", expression)) - {"and", "or", "not", "gpu"})
    return not any(
        compiled.evaluate(lambda name, **_: marks[name])
        for values in itertools.product((True, False), repeat=len(others))
        if (marks := {**dict(zip(others, values, strict=True)), "gpu": False})
    )


def allowed(reason: str) -> bool:
    """Returns whether a test may be skipped for this reason."""
    patterns = SKIPS if os.environ.get("CI") else (*SKIPS, *TOOLS)
    return any(re.search(pattern, reason) for pattern in patterns)


def _limit_of(item: pytest.Item) -> float:
    """Returns the seconds that an item may take now: more if more processes run than the machine has cores."""
    if any(item.get_closest_marker(mark) for mark in ("full", "gpu")):
        return float("inf")
    expression = item.config.option.markexpr
    if not expression or Expression.compile(expression).evaluate(lambda name, **_: name == "full"):
        return float("inf")  # everything runs: the limit applies in the other tier
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    busy = max(os.getloadavg()[0], 1.5 * workers)  # the load is a mean of the last minute
    # Half the slack of other limits, because a machine may run at half its speed for a minute.
    return LIMIT * max(1.0, slack() / 2) * max(1.0, busy / (os.cpu_count() or 1)) + paused()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not allowed(reason):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} was skipped for a reason that tests/suite_rules.py does not list:"
                f" {reason}"
            )
    elif report.passed and report.when == "call" and call.duration > (limit := _limit_of(item)):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {call.duration:.1f} s, and {limit:.1f} s are allowed now"
            f" ({LIMIT:g} s on an idle machine): make it faster, or mark it `full`"
        )
    return report
