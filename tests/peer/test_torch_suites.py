"""`make suites`: which release is taken, what its text becomes, and which tests count as failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch_suites import cpu_text, source, suites
from torch_suites.outcomes import Comparison, first_error


def _outcome(outcome: str, detail: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "detail": detail, "seconds": 1.0}


def _compared(gloo: dict[str, Any], peer: dict[str, Any], told: str = "") -> dict[str, Any]:
    comparison = Comparison("fastcoll")
    comparison.add("mesh", "test_mesh.py", (gloo, ""), (peer, told))
    return comparison.record({"test_mesh.py::T.named": "the reason"})


def test_the_release_nearest_to_torch_comes_first() -> None:
    versions = ["1.13.1+dfsg-4", "2.6.0+dfsg-7", "2.14.1+dfsg-1", "2.14.1+dfsg-1"]
    assert source._nearest_first(versions, "2.13.0") == [versions[2], versions[1], versions[0]]
    assert source._nearest_first(versions, "2.8.0")[0] == "2.6.0+dfsg-7"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('devices = ("cuda", "hpu")', 'devices = ("cpu", "hpu")'),
        ('device=f"cuda:{self.rank}"', 'device="cpu"'),
        ('backend="cpu:gloo,cuda:nccl"', 'backend="gloo"'),
        ("model = model.cuda(rank)", "model = model.cpu()"),
        ('torch.device("cuda", 0)', "torch.device('cpu')"),
        ('torch.device("cuda", torch.cuda.current_device())', "torch.device('cpu')"),
        ("torch.device(self.rank)", "torch.device('cpu')"),
        ("model.to(self.rank)", "model.to('cpu')"),
        ("FSDP(model, device_id=self.rank)", "FSDP(model, device_id=torch.device('cpu'))"),
        ("DDP(model, device_ids=[rank])", "DDP(model, device_ids=None)"),
        ("torch.cuda.synchronize()", "torch.cpu.synchronize()"),
        ("min(4, torch.cuda.device_count())", "min(4, 2)"),
        ("if torch.cuda.is_available():", "if torch.cuda.is_available():"),
    ],
)
def test_text_of_cuda_becomes_text_of_cpu(tmp_path: Path, text: str, changed: str) -> None:
    file = tmp_path / "fsdp" / "test_some.py"
    file.parent.mkdir()
    file.write_text(text)
    cpu_text.convert(tmp_path)
    assert file.read_text() == changed


def test_a_lifted_guard_is_imported_after_the_future(tmp_path: Path) -> None:
    file = tmp_path / "optim" / "test_some.py"
    file.parent.mkdir()
    file.write_text("# head\nfrom __future__ import annotations\nimport os\n@requires_nccl()\n")
    cpu_text.convert(tmp_path)
    lines = file.read_text().splitlines()
    assert lines[1:4:2] == ["from __future__ import annotations", "import os"]
    assert lines[2].endswith("import unguarded as requires_gloo_here")
    assert lines[4] == "@requires_gloo_here"


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


def test_the_record_names_no_folder_of_a_machine() -> None:
    comparison = Comparison("fastcoll")
    told = "ImportError: cannot import name 'A' (/home/me/torch/b.py)"
    comparison.not_imported["test_a.py"] = told
    assert comparison.record({})["files_ended_early"] == {
        "test_a.py": "ImportError: cannot import name 'A' (b.py)"
    }


def test_each_file_is_of_one_suite_and_those_left_out_of_none(tmp_path: Path) -> None:
    names = ("_composable/fsdp/test_a.py", "_composable/test_b.py", *suites.LEFT_OUT)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = suites.files_of(tmp_path, list(suites.SUITES))
    assert found["fsdp2"] == ["_composable/fsdp/test_a.py"]
    assert found["composable"] == ["_composable/test_b.py"]
    files = [file for names in found.values() for file in names]
    assert len(files) == len(set(files)) and not set(files) & set(suites.LEFT_OUT)
