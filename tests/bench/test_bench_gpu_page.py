"""The page that ``make gpu`` ends with, of what its parts left, whole or not."""

import pytest

from fastcoll.bench import gpu_page
from fastcoll.bench.record import write_record
from fastcoll.bench.step_profile import StepProfile

REPORT = {"versions": {"fastcoll": "0.1.0", "torch": "2.11.0", "NCCL": None}}
RUN = {"command": "python -m fastcoll.bench", "revision": "0123abc"}
TIME = {"time": {"median": 12.5}, "wrong": 0}
PROFILE = StepProfile(100.0, 20.0, 50.0, 0.0, 0.0, 30.0)._asdict()
MORE = StepProfile(109.6, 24.0, 57.2, 1.0, 9.0, 31.0)._asdict()


def step(median: float) -> dict:
    return {"time": {"median": median, "minimum": median}}


RECORDS = {
    "kernels_cuda.jsonl": {
        **RUN,
        "cases": [{}, {}, {}],
        "complete": True,
        "failed": {"flatten m": "Traceback:\n  a line\nValueError: wrong: ddp\n"},
        "targets": [
            {"name": "reduce: share of copy", "at_least": 0.9, "value": 0.8123, "met": False},
            {"name": "host of a launch", "at_most": 3.0, "value": 2.5, "met": True},
        ],
    },
    "engine_cuda.jsonl": {
        **RUN,
        "cases": [
            {"time": {"fastcoll": {"median": ours}, "nccl": {"median": 2.0}}}
            for ours in (3.48, 0.92)
        ],
    },
    "all_reduce_cuda_1rank.jsonl": {
        **RUN,
        "cases": [{"size": 1024, "backends": {"fastcoll": TIME, "nccl": {**TIME, "wrong": 3}}}],
    },
    "ddp_cuda_1rank.jsonl": {
        **RUN,
        "cases": [
            {
                "model": "resnet50",
                "failed": {"DDP": "no memory"},
                "alone": {**step(90.0), "profile": PROFILE},
                "cases": [
                    {"backend": "nccl", "buckets": "one bucket", **step(121.4), "wrong": 3},
                    {
                        "backend": "hook",
                        "buckets": "one bucket",
                        **step(95.0),
                        "wrong": 0,
                        "profile": MORE,
                    },
                ],
            }
        ],
    },
}
WELL = '<testcase classname="test_it" name="test_well" time="0.2"/>'
SKIPPED = (
    '<testcase classname="test_it" name="test_skipped"><skipped message="not here"/></testcase>'
)
BAD = (
    '<testcase classname="test_it" name="test_bad">'
    '<failure message="AssertionError: the flag was lost&#10;assert 1 == 2">the stack</failure></testcase>'
)


def junit(*cases: str) -> str:
    """As pytest writes it."""
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


@pytest.fixture
def folder(tmp_path):
    """What a run leaves in which one test of the engine fails."""
    (tmp_path / "tests_kernels.xml").write_text(junit(WELL, SKIPPED))
    (tmp_path / "tests_engine.xml").write_text(junit(WELL, SKIPPED, BAD))
    for name, record in RECORDS.items():
        write_record(tmp_path / name, record)
    return tmp_path


def test_everything_is_told(folder) -> None:
    text, well = gpu_page.page(folder, REPORT, ["NVIDIA H200"])
    assert not well
    for part in (
        "# fastcoll on NVIDIA H200",
        "fastcoll 0.1.0, torch 2.11.0\n",
        "| kernels | 1 | 0 | 1 | 0 |",
        "| engine | 1 | 1 | 1 | 0 |",
        "- **test_it::test_bad**: AssertionError: the flag was lost",
        "3 cases, 1 of 2 targets met",
        "- failed: flatten m: ValueError: wrong: ddp\n",
        "missed: reduce: share of copy: 0.81, at least 0.9",
        "median of 2 cases 1.10, worst 1.74",
        "1024 bytes: fastcoll 12.5 us, nccl 12.5 us; 3 wrong elements",
        "resnet50, nccl, one bucket: 31 us more than without DDP; 3 wrong elements",
        "hook, one bucket: 5 us more than without DDP; the host 10 us, 4 launches of 7 us beside",
        "failed: resnet50, DDP: no memory",
        "`python -m fastcoll.bench`, revision 0123abc",
    ):
        assert part in text, part
    assert "host of a launch" not in text
    assert all(name in text for name in RECORDS)


def test_without_a_failure_it_is_well(folder) -> None:
    (folder / "tests_engine.xml").write_text((folder / "tests_kernels.xml").read_text())
    assert gpu_page.page(folder, REPORT, ["NVIDIA H200"])[1]
    (folder / "tests_engine.xml").write_text(junit(SKIPPED))
    assert not gpu_page.page(folder, REPORT, ["NVIDIA H200"])[1]


def test_what_a_part_did_not_leave_is_missing(folder) -> None:
    whole = (folder / "tests_kernels.xml").read_text()
    (folder / "tests_engine.xml").write_text(whole[: len(whole) // 2])  # its process was ended
    (folder / "tests_kernels.xml").unlink()
    (folder / "engine_cuda.jsonl").unlink()
    (folder / "kernels_cuda.jsonl").write_text("{")
    text, well = gpu_page.page(folder, REPORT, [])
    assert not well and "# fastcoll on no GPU" in text
    assert (
        "| engine | missing: ParseError" in text
        and "| kernels | missing: FileNotFoundError" in text
    )
    assert text.count("- missing, or not whole: ") == 2


def test_the_command_writes_it(folder) -> None:
    assert gpu_page.main([str(folder)]) == 1
    assert (folder / "gpu.md").read_text().startswith("# fastcoll on ")
