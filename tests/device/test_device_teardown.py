"""A fault of device tensors that no call tells the program of ends the process, unless that is switched off."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import recording_device
from device_ranks import build_stand_in

TESTS = Path(__file__).parents[1]

# One rank, whose device does nothing for it until `token` is released; what follows is the case.
HEAD = """
import ctypes, os, tempfile, time
from datetime import timedelta
import device_ranks
given = os.environ.get("FASTCOLL_ERROR_HANDLING")
device_ranks.prepare()
if given is None:
    del os.environ["FASTCOLL_ERROR_HANDLING"]
import recording_device, torch
import torch.distributed as dist
if os.environ.get("HANGS"):
    from fastcoll._load import C
    from fastcoll.cuda import nccl_library
    library = nccl_library.load()
    addresses = library.entry_points()
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: time.sleep(60))
    addresses["ncclCommGetAsyncError"] = ctypes.cast(function, ctypes.c_void_p).value
    library.functions = C.NcclFunctions(addresses, library.version)
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("fastcoll", store=store, rank=0, world_size=1, timeout=timedelta(seconds=1))
x = torch.ones(3, device="recording")
dist.all_reduce(x)
token = recording_device.hold(torch.accelerator.current_stream())
dist.all_reduce(x)  # its end is never seen
"""

CASES = {
    "computes on": "time.sleep(30)",
    "computes on a while": "time.sleep(4)",
    "is told": """
end = time.monotonic() + 6
while time.monotonic() < end:
    try:
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        text = str(error)
        break
    time.sleep(0.1)
time.sleep(2.5)
print(text)
""",
    "asks": """
work = dist.all_reduce(x, async_op=True)
while not work.is_completed():
    time.sleep(0.05)
try:
    work.wait()
except dist.DistBackendError as error:
    time.sleep(2.5)
    print(error)
""",
    "has ended it": """
dist.destroy_process_group()
time.sleep(2)
print("lives")
""",
}


@pytest.fixture(scope="module", autouse=True)
def built():
    recording_device.build()
    build_stand_in()


def run(case: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "FASTCOLL_ERROR_HANDLING"}
    variables = {**kept, "PYTHONPATH": str(TESTS), **environment}
    return subprocess.run(
        [sys.executable, "-c", HEAD + CASES[case] + "\nrecording_device.release(token)\n"],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_process_that_computes_on_is_ended(tmp_path):
    ended = run("computes on", tmp_path, FASTCOLL_TRACE_DUMP=str(tmp_path / "trace"))
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "rank 0/1: the process is ended: all_reduce(seq 2, float32[3]" in ended.stderr
    assert "timed out after 1000 ms" in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["trace0"]


@pytest.mark.parametrize(
    "environment",
    [
        {"FASTCOLL_ERROR_HANDLING": "raise"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "FASTCOLL_ERROR_HANDLING": "raise"},
    ],
    ids=json.dumps,
)
def test_it_lives_where_that_is_asked_for(tmp_path, environment):
    ended = run("computes on a while", tmp_path, **environment)
    assert ended.returncode != -signal.SIGABRT, ended.stderr
    assert "the process is ended" not in ended.stderr
    assert "timed out after 1000 ms; the group is aborted" in ended.stderr


@pytest.mark.parametrize("case", ["is told", "asks"])
def test_a_program_that_is_told_lives(tmp_path, case):
    ended = run(case, tmp_path)
    assert "timed out after 1000 ms" in ended.stdout, ended.stderr
    assert "the process is ended" not in ended.stderr


def test_a_group_that_was_ended_ends_nobody(tmp_path):
    ended = run("has ended it", tmp_path)
    assert "the process is ended" not in ended.stderr
    assert ended.returncode != -signal.SIGABRT


@pytest.mark.parametrize(
    "environment",
    [{"FASTCOLL_HEARTBEAT_SECONDS": "2"}, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"}],
    ids=json.dumps,
)
def test_a_watchdog_that_stands_still_ends_the_process(tmp_path, environment):
    """NCCL does not answer it."""
    ended = run("computes on", tmp_path, HANGS="1", **environment)
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "the watchdog has waited 2000 ms for the device's driver" in ended.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"FASTCOLL_HEARTBEAT_SECONDS": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"},
        {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"},
    ],
    ids=json.dumps,
)
def test_nothing_looks_after_a_watchdog_if_that_is_asked_for(tmp_path, environment):
    ended = run("computes on a while", tmp_path, HANGS="1", **environment)
    assert "the watchdog has waited" not in ended.stderr
