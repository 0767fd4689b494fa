"""Whole runs: one by the command line, the others on living ranks."""

import inspect
import itertools
import sys
from unittest.mock import Mock

import pytest
import torch
from bench_ranks import FEW, SHORT, run_on
from programs import python
from torch.nn.parallel import DistributedDataParallel

from fastcoll._launch import launch
from fastcoll.bench import sweep
from fastcoll.bench.options import DTYPES, OPS
from fastcoll.bench.record import read_record


@pytest.mark.full
def test_the_command_starts_ranks_and_writes_its_record(tmp_path):
    path = tmp_path / "deep" / "result.jsonl"
    given = ["all_reduce", *FEW, "-b", "4", "-e", "4", "--nproc", "1", "--json", path]
    ended = python("-m", "fastcoll.bench", *given, "--backend", "fastcoll,absent")
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


def test_all_collectives_side_by_side(world):
    backends = "fastcoll,absent,gloo,fake,mpi,fastcoll-shared"
    ended = run_on(world, 2, "all", *SHORT, "--backend", backends)
    assert "# wrong elements: 0 OK" in ended.stdout
    assert "\n# scatter: fastcoll-shared is " in ended.stdout
    record = ended.record
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


def test_a_read_of_the_result_is_timed_with_the_call(world, monkeypatch):
    ended = run_on(world, 2, *SHORT, "--read", "-c", "0", "--backend", "fastcoll")
    assert "# results were not verified" in ended.stdout
    assert [case["floor"] for case in ended.cases] == [None, None]

    done: list[str] = []
    monkeypatch.setattr(sweep, "take_turn", lambda call, *_, **__: call())
    case = Mock(lifetime=None, receive=Mock(sum=lambda: done.append("read")))
    peer = Mock(place=lambda case: case, bind=lambda case: lambda: done.append("call"))
    run = Mock(options=Mock(check=0, seed=1, read=True), device=torch.device("cpu"))
    sweep._bound(run, [case], peer).turn(1)
    assert done == ["call", "call", "read"]  # the first call is untimed


def test_cold_calls_take_all_buffers_in_turn(world):
    given = ("all_reduce", "all_gather", "--cold", "-e", "64K", "--backend", "corrupting,gloo,fake")
    ended = run_on(world, 2, *given, *FEW, module="altered_rank", status=1)
    record = ended.record
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


def test_calls_in_rotation():
    made: list[int] = []
    data = Mock(reset=lambda: made.append(-1))
    calls = [lambda number=number: made.append(number) for number in range(3)]
    call, refresh = sweep._in_rotation(calls, [data, data])
    for _ in range(5):
        call()
    refresh()
    call()
    assert made == [0, 1, 2, 0, 1, -1, -1, 0]


def test_every_type_and_reduction_is_verified(world):
    """No right result is taken for a wrong one, and a changed element is counted."""
    kinds = ("-b", "40K", "-e", "40K", "-d", "all", "-o", "all", "--turn-ms", "0")
    given = (*FEW, *kinds, "--backend", "fastcoll,corrupting")
    cases = run_on(world, 3, *given, module="altered_rank", status=1).cases
    assert {(case["dtype"], case["op"]) for case in cases} == set(itertools.product(DTYPES, OPS))
    for case in cases:
        assert case["backends"]["fastcoll"]["wrong"] == 0, case
        assert case["backends"]["corrupting"]["wrong"] == 2, case


def test_wrong_results_end_with_status_1_and_refusals_are_named(world):
    given = ("all", *SHORT, "-r", "1", "--backend", "corrupting,refusing,gloo")
    ended = run_on(world, 2, *given, module="altered_rank", status=1)
    assert ended.stdout.splitlines()[-1] == "# wrong elements: 36 FAILED"
    assert "# 65536 B: refusing cannot do this: NotImplementedError: not today\n" in ended.stdout
    for case in ended.cases:
        # Before and after the timed calls; a barrier has no result.
        wrong = 0 if case["collective"] == "barrier" else 2
        assert case["backends"]["corrupting"]["wrong"] == wrong, case
        assert case["backends"]["gloo"]["wrong"] == 0
        assert set(case["unsupported"]) == {"refusing"}


BATCHED = "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters


@pytest.mark.parametrize(
    ("flags", "backends", "said"),
    [
        ([], ["fastcoll", "gloo", "unreduced"], "# fake is left out: DDP needs a process group"),
        (
            ["--keep-gradients"],
            ["fastcoll", "fastcoll-fused", "fastcoll-sync", *["gloo-batched"] * BATCHED],
            "which steps keep and add to",
        ),
    ],
    ids=["new gradients", "kept gradients"],
)
def test_steps_of_ddp_are_verified(world, flags, backends, said):
    given = ("ddp", "small", *flags, *FEW, "--backend", ",".join([*backends, "fake"]))
    ended = run_on(world, 2, *given, module="altered_rank")
    assert said in ended.stdout
    (row,) = ended.cases
    assert row["alone"]["time"]["median"] > 0 and row["kept"] == bool(flags)
    kinds = {(case["backend"], case["buckets"], case["wrong"]) for case in row["cases"]}
    assert {(backend, 0) for backend in backends} == {(name, wrong) for name, _, wrong in kinds}
    assert flags or len(kinds) == 2 * len(backends)  # default buckets, and one bucket


def test_nothing_to_measure_ends_with_status_2(world):
    ended = run_on(world, 1, "all_reduce", *SHORT, "--backend", "absent", status=2)
    assert "# nothing was measured" in ended.stdout


def test_the_status_of_a_rank_that_fails_is_passed_on():
    script = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '9' else sys.exit(7)"
    assert launch([sys.executable, "-c", script], 2) == 7
    assert launch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 1) == 137
