"""The benchmark of the device engine's host time, as far as it goes without a GPU."""

import ctypes
import os
import subprocess
from pathlib import Path

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from world import worlds_fixture

from fastcoll._measure import summarise
from fastcoll.bench import engine
from fastcoll.bench.device_timing import time_on_host
from fastcoll.bench.engine import CASES, BareNccl, call_of
from fastcoll.bench.options import script_parser
from fastcoll.bench.record import write_record


@pytest.mark.full
@on_ranks(1, world="nccl_world")
def test_every_case():
    """Its calls are right, and its times are of calls that were made."""
    device = torch.device("recording:0")
    groups = {"first": dist.new_group(), "second": dist.new_group()}
    with recording_device.no_violations():
        for case in CASES:
            calls = {name: call_of(case, group, device) for name, group in groups.items()}
            before = len(recording_device.log("launch"))
            times = time_on_host(calls, torch.recording.synchronize, rounds=2, batch=3)
            assert set(times) == set(groups)
            assert all(time.count == 2 and time.minimum > 0 for time in times.values())
            made = len(recording_device.log("launch")) - before
            assert made >= 2 * (2 + 2) * 3


# Ranks whose kernels are interpreted.
kernel_world = worlds_fixture(
    "launcher", "without_nccl", "device_libraries", prepare=peer_memory.prepare
)


@on_ranks(1, world="kernel_world")
def test_one_rank_launches_less_for_a_bucket():
    device, launches = torch.device("recording:0"), {}
    groups = {engine._COALESCED: dist.new_group(), engine._BUCKET: engine.bucket_group(device)}
    assert "FASTCOLL_ALGO" not in os.environ
    for case, group in groups.items():
        call = call_of(case, group, device)
        call()
        recording_device.clear()
        call()
        launches[case] = len(recording_device.log("launch"))
    assert 10 * launches[engine._BUCKET] < launches[engine._COALESCED], launches


@on_ranks(1, world="nccl_world")
def test_nccl_alone():
    """Each case is one call of NCCL, or a group of calls."""
    device = torch.device("recording:0")
    recording_device.clear()
    stand_in = ctypes.CDLL(None)  # has its calls beside NCCL's functions
    stand_in.fakeNcclCall.restype = ctypes.c_char_p
    bare = BareNccl(device, 0)
    made = {}
    for case in CASES:
        call = bare.call_of(case)
        stand_in.fakeNcclClearCalls()
        call()
        calls = range(stand_in.fakeNcclCallCount())
        names = [stand_in.fakeNcclCall(index).decode().split()[0] for index in calls]
        made[case.partition(",")[0] if "100" not in case else "100"] = names
    assert bare.call_of(engine._REPLAY) is None
    bare.close()
    assert made == {
        "all_reduce": ["allReduce"],
        "all_gather": ["allGather"],
        "reduce_scatter": ["reduceScatter"],
        "100": ["groupStart", *["allReduce"] * 100, "groupEnd"],
    }


def test_torchs_recorder_is_off_in_another_process(monkeypatch):
    started = {}

    def run(command, env, **_):
        started.update(command=command, env=env)
        if "9" in command:
            return subprocess.CompletedProcess(command, 1)
        path = Path(command[command.index("--json") + 1])
        write_record(path, {"cases": [{"case": "all_reduce", "time": {"nccl": {"median": 7.0}}}]})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert engine._unrecorded(3) == {"all_reduce": {"median": 7.0}}
    assert engine._unrecorded(9) == {}
    engine._unrecorded(3)
    assert started["env"]["TORCH_FR_BUFFER_SIZE"] == "0"
    options = script_parser("engine").parse_args(started["command"][3:])
    assert (options.rounds, options.only_nccl) == (3, True)


def test_columns_beside_the_backends(monkeypatch):
    def times(calls, *_):
        return {name: summarise([call()]) for name, call in calls.items()}

    monkeypatch.setattr(engine, "time_on_host", times)
    makers = {
        "fastcoll": lambda case: lambda: 4.0,
        "nccl": lambda case: lambda: 8.0,
        "NCCL alone": lambda case: None if case == engine._REPLAY else lambda: 1.0,
    }
    rows = engine._measure(makers, 1, {"all_reduce": {"median": 6.0}})
    names = [*makers, "nccl, no recorder"]
    assert [rows[0]["time"][name]["median"] for name in names] == [4.0, 8.0, 1.0, 6.0]
    assert list(rows[-1]["time"]) == ["fastcoll", "nccl"]
