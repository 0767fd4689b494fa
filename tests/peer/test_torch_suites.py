"""`make suites`: which tests count as failed."""

from __future__ import annotations

from typing import Any

from torch_suites.outcomes import Comparison, first_error


def _outcome(outcome: str, detail: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "detail": detail, "seconds": 1.0}


def _compared(gloo: dict[str, Any], peer: dict[str, Any], told: str = "") -> dict[str, Any]:
    comparison = Comparison("fastcoll")
    comparison.add("mesh", "test_mesh.py", (gloo, ""), (peer, told))
    return comparison.record({"test_mesh.py::T.named": "the reason"})


def test_what_gloo_passes_and_fastcoll_does_not_counts() -> None:
    gloo = {f"T.{name}": _outcome("passed") for name in ("good", "bad", "skipped", "lost", "named")}
    peer = {
        "T.good": _outcome("passed"),
        "T.bad": _outcome("failed", "Traceback\nRuntimeError: no such thing"),
        "T.skipped": _outcome("skipped", "not for me"),
        "T.named": _outcome("failed"),
    }
    record = _compared(gloo, peer, "no end within 600 s")
    fails = record["fastcoll_fails"]
    assert set(fails) == {f"test_mesh.py::T.{name}" for name in ("bad", "skipped", "lost", "named")}
    assert fails["test_mesh.py::T.bad"]["error"] == "RuntimeError: no such thing"
    assert fails["test_mesh.py::T.named"]["not_applicable"] == "the reason"
    assert record["files_ended_early"] == {"test_mesh.py": "no end within 600 s"}


def test_what_both_fail_or_skip_is_folded_by_reason() -> None:
    both = {
        "T.one": _outcome("failed", "ValueError: at 0x7f12"),
        "T.two": _outcome("failed", "ValueError: at 0x7f99"),
        "T.three": _outcome("skipped", "Need at least 4 CUDA devices"),
    }
    record = _compared(both, both)
    assert record["both_fail"] == {"ValueError: at ": 2}
    assert record["both_skip"] == {"Need at least 4 CUDA devices": 1}
    assert not record["fastcoll_fails"]


def test_a_failure_that_gloo_was_not_in_time_for_is_told() -> None:
    record = _compared({}, {"T.one": _outcome("failed", "ValueError: no")})
    assert record["not_compared"] == {"test_mesh.py::T.one": "ValueError: no"}
    assert not record["fastcoll_fails"] and not record["both_fail"]


def test_the_error_is_the_last_one_that_says_something() -> None:
    detail = "KeyError: 'a'\nDuring handling\nRuntimeError: Process 0 exited with error code 10\n"
    assert first_error(detail) == "KeyError: 'a'"
