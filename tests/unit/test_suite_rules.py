"""The rules of tests/suite_rules.py, on reports made by hand."""

import os
import time
from types import SimpleNamespace

import pytest
import suite_rules
from pauses import Pauses


def report_of(
    monkeypatch, *, seconds=0.1, marks=(), skip=None, load=0.0, selected="not gpu and not full"
):
    """Returns the report of an item after the rules have seen it."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    monkeypatch.setattr(suite_rules, "LIMIT", 5.0)  # FASTCOLL_TEST_SECONDS may have set another
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=selected))
    item = SimpleNamespace(
        nodeid="test_x.py::test", get_closest_marker=lambda m: m in marks, config=config
    )
    report = SimpleNamespace(
        when="call",
        skipped=skip is not None,
        passed=skip is None,
        outcome="passed" if skip is None else "skipped",
        longrepr=("test_x.py", 3, f"Skipped: {skip}"),
    )
    rules = suite_rules.pytest_runtest_makereport(item, SimpleNamespace(duration=seconds))
    next(rules)
    with pytest.raises(StopIteration) as end:
        rules.send(report)
    return end.value.value


@pytest.mark.parametrize(("slack", "limit"), [("1", 5.0), ("4", 10.0)])
def test_an_unmarked_item_above_the_limit_fails(monkeypatch, slack, limit):
    monkeypatch.setenv("FASTCOLL_TEST_SLACK", slack)
    assert report_of(monkeypatch, seconds=0.98 * limit).outcome == "passed"
    slow = report_of(monkeypatch, seconds=1.02 * limit)
    assert slow.outcome == "failed" and "mark it `full`" in slow.longrepr


def test_the_limit_grows_with_what_else_runs(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("FASTCOLL_TEST_SLACK", "1")
    assert report_of(monkeypatch, seconds=9.9, load=4.0).outcome == "passed"
    assert report_of(monkeypatch, seconds=10.1, load=4.0).outcome == "failed"


def test_a_skip_for_another_reason_than_those_listed_fails(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert report_of(monkeypatch, skip="torch finds no CUDA device").outcome == "skipped"
    found = report_of(monkeypatch, skip="it did not work today")
    assert found.outcome == "failed" and "it did not work today" in found.longrepr


def test_ci_has_the_tools_that_a_developer_may_lack(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert report_of(monkeypatch, skip="needs root: a user").outcome == "skipped"
    monkeypatch.setenv("CI", "true")
    assert report_of(monkeypatch, skip="needs root: a user").outcome == "failed"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", False),
        ("gpu", True),
        ("gpu and not full", True),
        ("gpu and (full or other)", True),
        ("gpu or full", False),
        ("not gpu", False),
        ("not full and not gpu", False),
    ],
)
def test_a_run_of_gpu_items_only(expression, expected):
    assert suite_rules.is_gpu_run(expression) is expected


def test_a_machine_that_stands_still_makes_bounds_longer(monkeypatch):
    monkeypatch.setenv("FASTCOLL_TEST_SLACK", "2")
    pauses = Pauses()  # not started: the test tells it when its sleeps ended
    monkeypatch.setattr(suite_rules, "_pauses", pauses)
    monkeypatch.setattr(suite_rules, "_paused_before", 0.0)
    now = time.monotonic()
    pauses.slept(now)
    pauses.slept(now + 0.3)  # a busy machine
    assert suite_rules.bound(1.0) == 2.0
    pauses.slept(now + 0.3 + 10.0)
    assert suite_rules.bound(1.0) == pytest.approx(2.0 + 10.0 - 0.05)
    assert report_of(monkeypatch, seconds=14.0).outcome == "passed"
    suite_rules.pytest_runtest_setup()
    assert suite_rules.bound(1.0) == 2.0, "a pause counts for the test that it met"


def test_a_pause_that_has_not_been_counted_yet_counts(monkeypatch):
    pauses = Pauses()
    pauses.slept(time.monotonic() - 5.0)
    assert 4.5 < pauses.seconds < 60.0
