"""Whole runs: one by the command line, the others on living ranks."""

import inspect
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bench_ranks import FEW, SHORT, run_on
from suite_rules import bound
from torch.nn.parallel import DistributedDataParallel
from world import Worlds

from fastcoll._launch import launch
from fastcoll._measure import Call
from fastcoll.bench import sweep
from fastcoll.bench.collectives import build_case
from fastcoll.bench.record import read_record


@pytest.mark.full
def test_the_command_starts_ranks_and_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.jsonl"
    command = [sys.executable, "-m", "fastcoll.bench", "all_reduce", *FEW, "-b", "4", "-e", "4"]
    ended = subprocess.run(
        [*command, "--nproc", "1", "--backend", "fastcoll,absent", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=bound(60),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "# wrong elements: 0 OK" in ended.stdout
    assert "absent is left out: torch.distributed has no backend of that name" in ended.stderr
    assert "%" not in ended.stderr  # no progress bar: this is no terminal
    record = read_record(path)
    for key in ("date", "command", "seed", "versions", "compiled_module_sha256"):
        assert record[key]
    for key in ("cpu", "cores", "memory_bytes", "kernel", "load_average"):
        assert record["machine"][key]
    assert record["command"].startswith("python -m fastcoll.bench all_reduce -n 1 ")
    assert [case["size"] for case in record["cases"]] == [4]


def test_all_collectives_side_by_side(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    backends = "fastcoll,absent,gloo,fake,mpi,fastcoll-shared"
    ended = run_on(world, 2, "all", *SHORT, "--backend", backends, "--json", path)
    assert ended.status == 0, ended
    assert "# wrong elements: 0 OK" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("# scatter: fastcoll-shared is ")
    record = read_record(path)
    assert record["backends"] == ["fastcoll", "gloo", "fake", "fastcoll-shared"]
    assert set(record["left_out"]) == {"absent", "mpi"}
    assert len({case["collective"] for case in record["cases"]}) == 10
    sizes = [case["size"] for case in record["cases"] if case["collective"] == "all_reduce"]
    assert sizes == [4, 65536]
    for case in record["cases"]:
        assert case["unsupported"] == {}
        assert 0 <= case["other_processes_percent"] <= 100
        assert case["attempts"] == 1
        assert set(case["backends"]) == {"fastcoll", "gloo", "fake", "fastcoll-shared"}
        assert case["backends"]["fake"]["wrong"] is None
        assert (case["floor"] is None) == (case["collective"] == "barrier")
        for backend in case["backends"].values():
            time = backend["time"]
            assert time["count"] == 4
            assert 0 < time["minimum"] <= time["lower"] <= time["median"]
            assert time["median"] <= time["upper"] <= time["maximum"]
            assert len(backend["rank_medians"]) == 2


def test_a_read_of_the_result_is_timed_with_the_call(
    world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.jsonl"
    ended = run_on(world, 2, *SHORT, "--read", "--backend", "fastcoll", "--json", path)
    assert ended.status == 0, ended
    assert [case["floor"] for case in read_record(path)["cases"]] == [None, None]

    def timed(call: Call, device: torch.device, calls: int, **_: object) -> float:
        call()
        return 1.0

    monkeypatch.setattr(sweep, "take_turn", timed)
    done: list[str] = []
    result = Mock(sum=lambda: done.append("read"))
    case = Mock(send=None, receive=result, lifetime=None)
    peer = Mock(place=lambda case: case, bind=lambda case: lambda: done.append("call"))
    run = Mock(options=Mock(check=0, seed=1, read=True), device=torch.device("cpu"))
    candidate = sweep._bound(run, [case], peer)
    assert done == ["call"]
    candidate.turn(1)
    assert done == ["call", "call", "read"]


def test_cold_calls_take_all_buffers_in_turn(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    given = ("all_reduce", "all_gather", "--cold", "-e", "64K", "--backend", "corrupting,gloo,fake")
    ended = run_on(world, 2, *given, *FEW, "--json", path, module="altered_rank")
    record = read_record(path)
    cache = record["machine"]["last_level_cache_bytes"]
    assert record["cold_bytes"] == 2 * cache > 0
    assert f"# cold: calls take buffers of {2 * cache >> 20} MiB in turn" in ended.stdout
    in_place, apart = record["cases"]
    assert in_place["buffers"] == 2 * cache // 65536
    assert apart["buffers"] == -(-2 * cache // (65536 + 32768))
    for case in record["cases"]:
        assert case["floor"]
        # A buffer is verified before and after the timed calls.
        assert case["backends"]["corrupting"]["wrong"] == 2 * case["buffers"]
        assert case["backends"]["gloo"]["wrong"] == 0


def test_calls_in_rotation() -> None:
    made: list[int] = []
    data = Mock(reset=lambda: made.append(-1))
    calls = [lambda number=number: made.append(number) for number in range(3)]
    call, refresh = sweep._in_rotation(calls, [data, data])
    for _ in range(5):
        call()
    refresh()
    call()
    assert made == [0, 1, 2, 0, 1, -1, -1, 0]
    case = build_case("all_reduce", 64, torch.float32, "sum", 0, 2, 0, torch.device("cpu"))
    assert sweep._alike(case, 0) == [case]
    cases = sweep._alike(case, 200)
    assert len({one.send.data_ptr() for one in cases}) == 4
    assert all(one.receive is one.send for one in cases)


def test_every_reduction_is_verified(world: Worlds) -> None:
    kinds = ("-b", "64K", "-e", "64K", "-d", "int8,half", "-o", "all")
    ended = run_on(world, 2, "all_reduce", *FEW, *kinds, "--backend", "fastcoll")
    assert ended.status == 0, ended
    rows = [
        line.split()
        for line in ended.stdout.splitlines()
        if " fastcoll " in line and line[0] == " "
    ]
    found = [(row[1], row[2]) for row in rows]
    every = [
        (dtype, op) for dtype in ("int8", "half") for op in ("sum", "prod", "min", "max", "avg")
    ]
    assert [kind for kind in every if kind not in found] == []


def test_wrong_results_end_with_status_1_and_refusals_are_named(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "result.jsonl"
    arguments = [*SHORT, "--backend", "corrupting,refusing,gloo", "--json", path]
    ended = run_on(world, 2, *arguments, module="altered_rank")
    assert ended.status == 1
    assert ended.stdout.splitlines()[-1] == "# wrong elements: 4 FAILED"
    assert "# 65536 B: refusing cannot do this: NotImplementedError: not today\n" in ended.stdout
    for case in read_record(path)["cases"]:
        assert case["backends"]["corrupting"]["wrong"] == 2  # before and after the timed calls
        assert case["backends"]["gloo"]["wrong"] == 0
        assert set(case["unsupported"]) == {"refusing"}


def test_steps_of_ddp_are_verified_and_compared(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    given = ("ddp", "small", "--backend", "fastcoll,gloo,unreduced,fake", "--json", path)
    ended = run_on(world, 2, *given, *FEW, module="altered_rank")
    assert ended.status == 0, ended
    (row,) = read_record(path)["cases"]
    assert row["alone"]["time"]["median"] > 0
    kinds = [(case["backend"], case["buckets"], case["wrong"]) for case in row["cases"]]
    assert sorted(kinds) == [
        (backend, buckets, 0)
        for backend in ("fastcoll", "gloo", "unreduced")
        for buckets in ("default buckets", "one bucket")
    ]
    assert "# fake is left out: DDP needs a process group" in ended.stdout


def test_steps_that_keep_gradients_are_verified(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    backends = ["fastcoll", "fastcoll-fused", "fastcoll-sync"]
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        backends.append("gloo-batched")
    given = ("ddp", "small", "--keep-gradients", "--backend", ",".join(backends), "--json", path)
    ended = run_on(world, 2, *given, *FEW, module="altered_rank")
    assert ended.status == 0, ended
    assert "which steps keep and add to" in ended.stdout
    (row,) = read_record(path)["cases"]
    assert row["kept"]
    assert {(case["backend"], case["wrong"]) for case in row["cases"]} == {
        (backend, 0) for backend in backends
    }


def test_nothing_to_measure_ends_with_status_2(world: Worlds) -> None:
    ended = run_on(world, 1, "all_reduce", *SHORT, "--backend", "absent")
    assert ended.status == 2
    assert "# nothing was measured" in ended.stdout


def test_the_status_of_a_rank_that_fails_is_passed_on() -> None:
    script = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '9' else sys.exit(7)"
    assert launch([sys.executable, "-c", script], 2) == 7
    assert launch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 1) == 137
