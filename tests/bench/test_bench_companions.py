"""Backends in companions: with gloo, and where `make peers` has been run with the real ones."""

import sys
import time
from pathlib import Path

import pytest
from bench_ranks import Ended, run_on
from short_run import SHORT
from suite_rules import bound
from world import Worlds

from fastcoll.bench.environments import ENVIRONMENTS
from fastcoll.bench.launch import launch
from fastcoll.bench.record import read_record

IDLE_RANK = str(Path(__file__).with_name("idle_rank.py"))
INSTALLED = [name for name, environment in ENVIRONMENTS.items() if not environment.missing()]
pytestmark = pytest.mark.full  # a study


def measure(world: Worlds, tmp_path: Path, *arguments: str, ranks: int = 2) -> tuple[Ended, dict]:
    path = tmp_path / "result.jsonl"
    ended = run_on(world, ranks, *arguments, "--json", path, module="altered_rank")
    return ended, read_record(path)


def test_a_companion_is_verified_and_timed_as_any_other(world: Worlds, tmp_path: Path) -> None:
    ended, record = measure(world, tmp_path, "all", *SHORT, "--backend", "Gloo,fastcoll")
    assert ended.status == 0
    assert record["backends"] == ["Gloo", "fastcoll"]
    assert record["libraries"]["Gloo"].startswith("gloo of torch ")
    assert list(record["settings"]) == ["Gloo"]
    assert len({case["collective"] for case in record["cases"]}) == 10
    for case in record["cases"]:
        assert case["unsupported"] == {}
        for backend in case["backends"].values():
            assert backend["wrong"] == 0
            assert backend["time"]["count"] == 4
            assert len(backend["rank_medians"]) == 2


def test_a_wrong_result_in_a_companion_ends_with_status_1(world: Worlds, tmp_path: Path) -> None:
    ended, record = measure(world, tmp_path, *SHORT, "--backend", "Wrong,Gloo")
    assert ended.status == 1
    assert "# wrong elements: 4 FAILED" in ended.stdout
    for case in record["cases"]:
        assert [case["backends"][name]["wrong"] for name in ("Wrong", "Gloo")] == [2, 0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Dying", "it ended with status 3: RuntimeError: the end, asked for 'turn'"),
        ("Hanging", "it did not answer within 2 s, asked for 'turn'"),
    ],
)
def test_a_companion_that_is_lost_is_named_and_the_others_go_on(
    world: Worlds, tmp_path: Path, kind: str, reason: str
) -> None:
    begin = time.monotonic()
    arguments = ["-b", "64K", "-e", "128K", "-f", "2", *SHORT[6:], "--timeout", "2"]
    ended, record = measure(world, tmp_path, *arguments, "--backend", f"{kind},fastcoll")
    assert time.monotonic() - begin < bound(20)
    assert ended.status == 0
    assert len(record["cases"]) == 2
    for case in record["cases"]:
        assert list(case["backends"]) == ["fastcoll"]
        assert case["backends"]["fastcoll"]["wrong"] == 0
        assert list(case["unsupported"]) == [kind]
    assert reason in str([case["unsupported"][kind] for case in record["cases"]])


def test_what_cannot_be_loaded_is_left_out_with_the_reason(world: Worlds, tmp_path: Path) -> None:
    names = "uninstalled,unstartable,Unloadable,Gloo"
    ended, record = measure(world, tmp_path, *SHORT, "--backend", names)
    assert ended.status == 0
    assert record["backends"] == ["Gloo"]
    assert record["left_out"] == {
        "uninstalled": "it is not installed: run `make peers`",
        "unstartable": "it ended with status 1",
        "Unloadable": "rank 1: ImportError: libnothing.so: cannot open shared object file",
    }


def rest(tmp_path: Path, names: list[str]) -> dict[str, float]:
    path = tmp_path / "rested.jsonl"
    assert launch([sys.executable, IDLE_RANK, str(path), "--backend", ",".join(names)], 2) == 0
    written = read_record(path)
    assert written["left_out"] == {}
    return written["rested"]


def test_an_idle_companion_uses_no_cpu(tmp_path: Path) -> None:
    assert (
        rest(tmp_path, ["Gloo"])["Gloo"] < 0.05
    )  # of a second, which the kernel counts in hundredths


if INSTALLED:  # by `make peers`, which takes gigabytes

    def test_idle_companions_of_real_peers_use_no_cpu(tmp_path: Path) -> None:
        rested = rest(tmp_path, INSTALLED)
        assert [name for name, seconds in rested.items() if seconds > 0.01] == []

    @pytest.mark.parametrize(("collectives", "ranks"), [("all", 2), ("all_reduce", 4)])
    def test_real_peers_deliver_what_they_know(
        world: Worlds, tmp_path: Path, collectives: str, ranks: int
    ) -> None:
        size = ["-b", "32K", "-e", "32K", "-n", "2", "--rounds", "1", "-w", "0", "--turn-ms", "0"]
        arguments = [collectives, *size, "-d", "float,bfloat16", "--backend", ",".join(INSTALLED)]
        ended, record = measure(world, tmp_path, *arguments, ranks=ranks)
        assert ended.status == 0
        assert record["left_out"] == {}
        assert all(record["libraries"].values())
        for case in record["cases"]:
            assert all(backend["wrong"] == 0 for backend in case["backends"].values())
            assert all("NotImplementedError" in reason for reason in case["unsupported"].values())
            if case["collective"] == "all_reduce" and case["dtype"] == "float":
                assert list(case["backends"]) == INSTALLED
