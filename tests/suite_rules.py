"""Rules for every test: its tier, the reasons to skip it, its share of time.

``make test`` runs the tests not marked ``full``, the short tier; ``make test-all`` runs everything. A test never
fails because it takes long: the end of a run lists the items of the short tier above ``SHARE`` seconds, and their
sum. A test may be skipped only for a reason of ``SKIPS``. Any other reason fails it, so a missing tool is noticed.
"""

import itertools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from _pytest.mark.structures import ParameterSet
from pauses import Pauses

SHARE = 5.0
"""Seconds that an item not marked ``full`` should take at most on an idle machine."""

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


def full(*values: object, **named: Any) -> ParameterSet:
    """Return a parameter with which only the full tier runs a test."""
    return pytest.param(*values, marks=pytest.mark.full, **named)


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
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the items of the short tier above their share, and how long the tier took, summed over all workers."""
    long, total = _short_tier(terminalreporter)
    terminalreporter.section("the short tier")
    for report in long:
        terminalreporter.write_line(f"{report.duration:6.1f} s  {report.nodeid}")
    terminalreporter.write_line(
        f"{len(long)} items took more than {SHARE:g} s; all items together took {total:.1f} s"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run whose short tier took more than FASTCOLL_TEST_SUM seconds; only a nightly job sets a limit."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    limit = float(os.environ.get("FASTCOLL_TEST_SUM", "inf"))
    if reporter is not None and _short_tier(reporter)[1] > limit:  # a worker has no reporter
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _short_tier(reporter: pytest.TerminalReporter) -> tuple[list[pytest.TestReport], float]:
    """Return the calls above their share, slowest first, and the tier's seconds, fixtures included."""
    tier = [
        report
        for reports in reporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and not {"full", "gpu"} & set(report.keywords)
    ]
    long = [report for report in tier if report.when == "call" and report.duration > SHARE]
    return sorted(long, key=lambda report: -report.duration), sum(r.duration for r in tier)
