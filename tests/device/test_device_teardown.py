"""A fault of device tensors that no call tells the program of ends the process, unless that is switched off."""

import json
import signal

import pytest
from suite_rules import full

# One rank, whose device does nothing for it until `token` is released; what follows is the case.
HEAD = """
import ctypes, os, time
from datetime import timedelta
import device_ranks
given = os.environ.get("FASTCOLL_ERROR_HANDLING")
device_ranks.prepare()
if given is None:
    del os.environ["FASTCOLL_ERROR_HANDLING"]
import recording_device, torch
import torch.distributed as dist
if os.environ.get("HANGS"):
    from fastcoll._load_cuda import CUDA
    from fastcoll.cuda import nccl_library
    library = nccl_library.load()
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: time.sleep(60))
    hanging = ctypes.cast(function, ctypes.c_void_p).value
    find = lambda name: hanging if name == "ncclCommGetAsyncError" else library.address(name)
    library.functions = CUDA.NcclFunctions(find, library.version)

def aborted():
    while "the group is aborted" not in open("stderr").read():
        time.sleep(0.05)

store = dist.HashStore()
dist.init_process_group("fastcoll", store=store, rank=0, world_size=1, timeout=timedelta(seconds=1))
x = torch.ones(3, device="recording")
dist.all_reduce(x)
token = recording_device.hold(torch.accelerator.current_stream())
dist.all_reduce(x)  # its end is never seen
"""

# If no call has raised the fault, the process is ended 1 s after the group is aborted.
CASES = {
    "computes on": "time.sleep(60)",
    "computes on after the abort": "aborted(); time.sleep(1.4)",
    "computes on a while": "time.sleep(2.5)",
    "is told": """
while True:
    try:
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        print(error)
        break
    time.sleep(0.1)
aborted()
time.sleep(1.4)
""",
    "asks": """
work = dist.all_reduce(x, async_op=True)
while not work.is_completed():
    time.sleep(0.05)
try:
    work.wait()
except dist.DistBackendError as error:
    print(error)
aborted()
time.sleep(1.4)
""",
    "has ended it": """
try:
    dist.destroy_process_group()
except dist.DistBackendError as error:  # if the call timed out before the wait for it did
    assert "the group failed before it was destroyed" in str(error)
time.sleep(2)
print("lives")
""",
}


@pytest.fixture
def run(launcher, device_libraries, tmp_path):
    """``run(case, NAME="value")`` runs the program of a case in a process of its own."""

    def run(case, **environment):
        text = HEAD + CASES[case] + "\nrecording_device.release(token)\n"
        environment = {"FASTCOLL_ERROR_HANDLING": None, **environment}
        return launcher.program(text, tmp_path, limit=100, **environment)

    return run


def test_a_process_that_computes_on_is_ended(run, tmp_path):
    ended = run("computes on", FASTCOLL_TRACE_DUMP=str(tmp_path / "trace"))
    assert ended.status == -signal.SIGABRT, ended.stderr
    assert "rank 0/1: aborting the process: all_reduce(seq 2, float32[3]" in ended.stderr
    assert "timed out after 1000 ms" in ended.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"trace0", "stdout", "stderr"}


@pytest.mark.full
@pytest.mark.parametrize(
    "environment",
    [
        {"FASTCOLL_ERROR_HANDLING": "raise"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "FASTCOLL_ERROR_HANDLING": "raise"},
    ],
    ids=json.dumps,
)
def test_it_lives_where_that_is_asked_for(run, environment):
    ended = run("computes on after the abort", **environment)
    assert ended.status != -signal.SIGABRT, ended.stderr
    assert "aborting the process" not in ended.stderr
    assert "the group is aborted: all_reduce(seq 2, float32[3]" in ended.stderr
    assert "timed out after 1000 ms" in ended.stderr


@pytest.mark.parametrize("case", ["is told", full("asks")])
def test_a_program_that_is_told_lives(run, case):
    ended = run(case)
    assert "timed out after 1000 ms" in ended.stdout, ended.stderr
    assert "aborting the process" not in ended.stderr


@pytest.mark.full
def test_a_group_that_was_ended_ends_nobody(run):
    ended = run("has ended it")
    assert ended.stdout == "lives\n"
    assert "aborting the process" not in ended.stderr
    assert ended.status != -signal.SIGABRT


@pytest.mark.full
@pytest.mark.parametrize(
    "environment",
    [{"FASTCOLL_HEARTBEAT_SECONDS": "1"}, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"}],
    ids=json.dumps,
)
def test_a_watchdog_that_stands_still_ends_the_process(run, environment):
    """NCCL does not answer it."""
    ended = run("computes on", HANGS="1", **environment)
    assert ended.status == -signal.SIGABRT, ended.stderr
    assert "the watchdog has waited 1000 ms for the CUDA driver" in ended.stderr


@pytest.mark.full
def test_a_process_whose_watchdog_stands_still_is_ended_too(run):
    """The call's timeout is detected by the other thread, which ends the process after its report."""
    ended = run("computes on", HANGS="1", FASTCOLL_HEARTBEAT_SECONDS="0")
    assert ended.status == -signal.SIGABRT, ended.stderr
    assert "the CUDA driver does not respond" in ended.stderr
    assert "The error was not raised in Python within 1 s" in ended.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "environment",
    [
        {"FASTCOLL_HEARTBEAT_SECONDS": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"},
        {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"},
    ],
    ids=json.dumps,
)
def test_nothing_looks_after_a_watchdog_if_that_is_asked_for(run, environment):
    ended = run("computes on a while", HANGS="1", **environment)
    assert "the watchdog has waited" not in ended.stderr
