"""The rules of tests/suite_rules.py, on reports made by hand and on runs of pytest."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import suite_rules
from pauses import Pauses
from programs import python


def report_of(skip):
    """Returns the report of a skipped item after the rules have seen it."""
    report = SimpleNamespace(
        skipped=True, outcome="skipped", longrepr=("test_x.py", 3, f"Skipped: {skip}")
    )
    item = SimpleNamespace(nodeid="test_x.py::test")
    rules = suite_rules.pytest_runtest_makereport(item, None)
    next(rules)
    with pytest.raises(StopIteration) as end:
        rules.send(report)
    return end.value.value


OF_A_RUN = """
import time
import pytest
import suite_rules
from suite_rules import pytest_sessionfinish, pytest_terminal_summary

suite_rules.SHARE = {share}

def test_short():
    time.sleep(0.2)

@pytest.mark.full
def test_long():
    time.sleep(0.2)
"""


@pytest.mark.parametrize(("workers", "share", "most"), [(1, 0.1, "0.1"), (0, 60, None)])
def test_the_end_of_a_run_lists_long_items(tmp_path, workers, share, most):
    """Only a run with a limit for the sum fails because it took long."""
    (tmp_path / "conftest.py").write_text(OF_A_RUN.format(share=share).partition("def test")[0])
    (tmp_path / "test_run.py").write_text(OF_A_RUN.format(share=share))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "FASTCOLL"))}
    environment["PYTHONPATH"] = str(Path(suite_rules.__file__).parent)
    environment |= {"FASTCOLL_TEST_SUM": most} if most else {}
    flags = [f"--rootdir={tmp_path}", "-c/dev/null", f"-n{workers}", str(tmp_path)]
    ended = python("-m", "pytest", *flags, env=environment)
    assert ended.returncode == (pytest.ExitCode.TESTS_FAILED if most else 0), ended.stdout
    assert "2 passed" in ended.stdout
    text = ended.stdout.partition("the short tier")[2]
    assert f"{workers} items took more than {share:g} s; all items together took " in text
    assert ("test_run.py::test_short" in text) == bool(most) and "test_long" not in text


def test_a_skip_for_another_reason_than_those_listed_fails(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert report_of("torch finds no CUDA device").outcome == "skipped"
    found = report_of("it did not work today")
    assert found.outcome == "failed" and "it did not work today" in found.longrepr
    assert report_of("needs root: a user").outcome == "skipped"
    monkeypatch.setenv("CI", "true")  # which has the tools that a developer may lack
    assert report_of("needs root: a user").outcome == "failed"


def test_a_run_of_gpu_items_only():
    for expression in ("gpu", "gpu and not full", "gpu and (full or other)"):
        assert suite_rules.is_gpu_run(expression)
    for expression in ("", "gpu or full", "not gpu", "not full and not gpu"):
        assert not suite_rules.is_gpu_run(expression)


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
    suite_rules.pytest_runtest_setup()
    assert suite_rules.bound(1.0) == 2.0, "a pause counts for the test that it met"
    pauses.slept(time.monotonic() - 5.0)
    assert suite_rules.bound(1.0) > 6.0, "a pause that is not over counts"
