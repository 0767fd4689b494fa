"""The wall clock steps during a wait: deadlines stay exact, for they are of a clock that does not step."""

import ctypes
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank, catch
from in_call import soon
from in_time import in_time
from launcher import Launcher
from over_hosts import over_hosts
from rank_calls import works


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Its processes have a library loaded before all others: the machine's own clock is left alone."""
    library = tmp_path_factory.mktemp("clock") / "clock_step.so"
    source = Path(__file__).with_name("clock_step.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    launcher = Launcher({"LD_PRELOAD": str(library)})
    yield launcher.wait()
    launcher.close()


def step(hours: int) -> None:
    """Step the wall clock as this process sees it, all clocks of libc included."""
    before = time.time()
    ctypes.CDLL(None).clock_step(ctypes.c_long(3600 * hours))
    assert abs(time.time() - before - 3600 * hours) < 10, "the clock has not moved"


def waits_while_clock_steps(rank: Rank):
    """Rank 0's clock steps while it waits for rank 1, whose clock has stepped before."""
    rank.used(timeout=20.0)

    def steps() -> None:
        step(1)
        time.sleep(0.2)  # the wait goes on in another hour
        step(-2)
        rank.tell("stepped")

    if rank.rank == 1:
        step(1)
        rank.hear()
    else:
        threading.Timer(0.2, steps).start()
    start = time.monotonic()
    works(rank)
    seconds = time.monotonic() - start
    rank.finish()
    return seconds


def times_out_while_clock_steps(rank: Rank):
    rank.used()
    soon(1.0)
    if rank.rank == 1:
        rank.hear()
        return
    threading.Timer(0.3, step, (-1,)).start()
    rank.tell(catch(dist.all_reduce, torch.ones(3)))


@plays(22)
@over_hosts
@pytest.mark.full
def test_a_wait_while_the_clock_steps(jobs):
    job = jobs(2, waits_while_clock_steps)
    assert job.hear(0) == "stepped"
    job.tell(1)
    for seconds in job.hear_all().values():
        in_time(seconds, 5.0)


@plays(22)
@over_hosts
@pytest.mark.full
def test_a_timeout_while_the_clock_steps(jobs):
    job = jobs(2, times_out_while_clock_steps)
    fault = job.hear(0)
    assert fault is not None and "timed out" in fault.text.lower() and fault.seconds > 0.8, fault
    in_time(fault.seconds, 1.5, fault.text)
    job.tell(1)
