"""tests/peer/torch_suites: which tests count as failed."""

from torch_suites.outcomes import Comparison


def _outcome(outcome: str, detail: str = "") -> dict[str, str]:
    return {"outcome": outcome, "detail": detail}


def test_what_gloo_passes_and_fastcoll_does_not_counts():
    gloo = {f"T.{name}": _outcome("passed") for name in ("good", "bad", "skipped", "lost", "named")}
    ours = {
        "T.good": _outcome("passed"),
        "T.bad": _outcome(
            "failed",
            "ValueError: no\nDuring handling\nRuntimeError: Process 0 exited with error code 10",
        ),
        "T.skipped": _outcome("skipped", "not for me"),
        "T.named": _outcome("failed"),
        "T.late": _outcome("failed", "Traceback\nKeyError: 'a'"),
    }
    both = {"T.both": _outcome("failed", "ValueError: no")}
    comparison = Comparison()
    comparison.add("mesh", "m.py", (gloo | both, ""), (ours | both, "no end within 600 s"))
    record = comparison.record({"m.py::T.named": "the reason"})
    fails = record["fastcoll_fails"]
    assert set(fails) == {f"m.py::T.{name}" for name in ("bad", "skipped", "lost", "named")}
    assert fails["m.py::T.bad"]["error"] == "ValueError: no"
    assert fails["m.py::T.named"]["not_applicable"] == "the reason"
    assert record["files_ended_early"] == {"m.py": "no end within 600 s"}
    assert record["not_compared"] == {"m.py::T.late": "KeyError: 'a'"}
