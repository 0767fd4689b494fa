"""Groups that end by one rank's fault: the others are told at once, and nothing that hangs is waited for."""

import ctypes
import os
import re
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import recording_device
import torch
import torch.distributed as dist
from device_calls import all_reduce
from device_ranks import called, fault_of, has_failed, inject
from on_ranks import on_ranks
from suite_rules import bound, full, until

from fastcoll.cuda.all_reduce import AllReduces
from fastcoll.cuda.nccl_life import ABORT_SECONDS

pytestmark = on_ranks(2, world="nccl_world", fresh=True)

DEVICE = "recording:0"


def group(seconds=60):
    """A group that has made one call, with the time limit of later calls."""
    own = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(3, device=DEVICE), group=own)
    own._get_backend(torch.device(DEVICE)).set_timeout(timedelta(seconds=seconds))
    return own


def reduce(own):
    dist.all_reduce(torch.ones(3, device=DEVICE), group=own)


def test_a_call_that_fails_on_one_rank():
    own = group()
    if dist.get_rank() == 0:
        inject("fail allReduce 2 0 1")
    text, took = fault_of(lambda: reduce(own))
    assert took < bound(5)
    if dist.get_rank() == 0:
        assert "injected into allReduce" in text and "seq 2" in text
    else:
        assert "another rank met a fault: rank 0: all_reduce(seq 2, float32[3]) failed" in text
    assert "the group failed before: " in fault_of(lambda: reduce(own))[0]


def test_an_abort_is_told():
    own = group()
    if dist.get_rank() == 0:
        own.abort()
        assert "rank 0 aborted the group" in fault_of(lambda: reduce(own))[0]
    else:
        text, took = fault_of(lambda: reduce(own))  # waits in the library for rank 0
        assert re.search("another rank met a fault: .*rank 0 aborted the group", text)
        assert took < bound(5)


@pytest.mark.parametrize("before", [False, full(True)])
def test_an_interrupt_of_a_call(before):
    """What the user does to the program is not made an error, and the other rank is not left to wait.

    The same before the call, while the code of a kernel is made.
    """
    own = group()
    if dist.get_rank() == 0:
        made = {"side_effect": KeyboardInterrupt} if before else {"return_value": True}
        with (
            mock.patch.object(AllReduces, "compile", **made),
            mock.patch.object(AllReduces, "plan", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            all_reduce(torch.ones(3, device=DEVICE), group=own, algorithm="nccl")
    told = "was interrupted before it began" if before else "was interrupted"
    assert told in fault_of(lambda: reduce(own))[0]


@pytest.mark.full
def test_a_pair_alone():
    """Ranks that have met in no collective tell each other all the same."""
    own = dist.new_group(timeout=timedelta(seconds=2))
    x = torch.ones(3, device=DEVICE)
    peer = 1 - dist.get_rank()
    dist.send(x, peer, group=own) if dist.get_rank() == 0 else dist.recv(x, peer, group=own)
    if dist.get_rank() == 0:
        text, _ = fault_of(lambda: dist.recv(x, peer, group=own))
        assert "recv(seq 2" in text and "rank 1 completed call 1 of 1, under way: nothing" in text
    else:
        until(lambda: has_failed(own))
        text, _ = fault_of(lambda: dist.recv(x, peer, group=own))
        assert "another rank met a fault: rank 0: recv(seq 2" in text


def test_a_fault_that_nobody_was_told():
    """The program's last call has failed: the end of the group says so."""
    own = group(seconds=1)
    if dist.get_rank() == 0:
        with recording_device.held(torch.accelerator.current_stream()):
            dist.all_reduce(torch.ones(3, device=DEVICE), group=own, async_op=True)
            until(lambda: has_failed(own))
        text, _ = fault_of(lambda: dist.destroy_process_group(own))
        assert "the group failed before it was destroyed" in text
        assert "all_reduce(seq 2, float32[3]) timed out after 1000 ms" in text
    else:
        dist.all_reduce(torch.ones(3, device=DEVICE), group=own)
        until(lambda: has_failed(own))
        fault_of(lambda: reduce(own))
        dist.destroy_process_group(own)


@pytest.mark.full
def test_an_aborted_work_has_no_result():
    """While the error's text is on its way, a wait does not pass for a success."""
    own = group(seconds=1)
    stream = torch.accelerator.current_stream()
    token = recording_device.hold(stream) if dist.get_rank() == 0 else None
    work = dist.all_reduce(torch.ones(3, device=DEVICE), group=own, async_op=True)
    if token is not None:
        until(lambda: has_failed(own))
        recording_device.release(token)  # as after an abort: the stream goes on
        text, _ = fault_of(work.wait)
        assert "timed out after 1000 ms" in text
    else:
        until(lambda: has_failed(own))
        fault_of(lambda: reduce(own))


@pytest.mark.full
def test_an_abort_that_hangs():
    own = group()
    inject("hang abort 0 0 1")
    start = time.monotonic()
    own.abort()
    assert time.monotonic() - start < ABORT_SECONDS  # else it has waited
    dist.destroy_process_group(own)
    assert time.monotonic() - start < bound(3)


def test_a_making_that_is_aborted():
    """Rank 1 does not come: an abort ends the waiting for it."""
    own = dist.new_group(timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        threading.Timer(0.5, own.abort).start()
        text, took = fault_of(lambda: reduce(own))
        assert "aborted" in text and took < bound(3)


def test_no_engine_after_an_abort():
    own = dist.new_group()
    own.abort()
    assert "aborted the group" in fault_of(lambda: reduce(own))[0]


@pytest.mark.full
def test_the_lock_of_python_is_held():
    """The watchdog aborts while a thread holds the GIL and does not let it go."""
    own = group(seconds=1)
    if dist.get_rank() == 1:
        until(lambda: has_failed(own))
        fault_of(lambda: reduce(own))
        return
    before, calls, aborts = called("abort"), called("allReduce"), []

    def hold():
        until(lambda: called("allReduce") > calls)  # the other thread is in the library
        ctypes.PyDLL(None).sleep(4)  # a PyDLL keeps the lock
        aborts.append(called("abort"))

    thread = threading.Thread(target=hold)
    thread.start()
    text, _ = fault_of(lambda: reduce(own))
    thread.join()
    assert aborts == [before + 1] and "timed out after 1000 ms" in text


def test_a_fork_is_told():
    own = group()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(3, device=DEVICE), group=own)
            os.write(writing, b"nothing")
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"this process is a fork of the one that made the group" in pipe.read()
    os.waitpid(child, 0)
    reduce(own)
