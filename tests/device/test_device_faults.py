"""What ends a group of device tensors: calls that hang, in the library or on the device, and its errors."""

import time
from datetime import timedelta

import pytest
import recording_device
import torch
import torch.distributed as dist
from backend import since
from device_ranks import fault_of, has_failed, inject, used_group
from fault_list import plays
from on_ranks import on_ranks
from suite_rules import bound, until
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = on_ranks(2, world="nccl_world", fresh=True)

DEVICE = "recording:0"


def group(seconds):
    return dist.new_group(timeout=timedelta(seconds=seconds))


@plays(66)
def test_hang_in_the_library():
    """Rank 0 calls all_reduce, rank 1 does not; the watchdog frees the thread that hangs in the call."""
    own, x = used_group(2)
    if dist.get_rank() == 1:
        text, took = fault_of(lambda: wait_for_fault(own))
        assert "another rank met a fault: rank 0: all_reduce(seq 2, float32[4]) timed out" in text
        return
    text, took = fault_of(lambda: dist.all_reduce(x, group=own))
    assert "all_reduce" in text and "seq 2" in text and "timed out after 2000 ms" in text
    assert "rank 1 completed call 1 of 1, under way: nothing" in text
    # Two seconds of the group, and one in which the watchdog asks how far the others came.
    assert 1.9 < took < bound(4), took
    text, took = fault_of(lambda: dist.all_reduce(x, group=own))
    assert "the group failed before: " in text and took < bound(1)


def wait_for_fault(own):
    """Calls once the group is known to have failed, with nothing that would wait for the other rank."""
    until(lambda: has_failed(own))
    dist.all_reduce(torch.ones(3, device=DEVICE), group=own)


@plays(66)
def test_hang_on_the_device():
    """A stream that does not get on: the work's error says which call, and when."""
    own, x = used_group(1)
    with recording_device.held(torch.accelerator.current_stream()):
        work = dist.all_reduce(x, group=own, async_op=True)
        assert not work.is_completed()
        text, took = fault_of(lambda: work.wait(timedelta(seconds=30)))
        assert "all_reduce(seq 2, float32[4]) timed out after 1000 ms" in text
        assert 0.9 < took < bound(2)
    assert not work.is_success()
    assert work.get_future_result().wait() == 1  # WorkResult.TIMEOUT


@since(14, "abort hooks")
def test_hooks_come_first():
    """The watchdog calls abort hooks before the call has failed, and once."""
    own, x = used_group(1)
    seen, works = [], []

    def hook():
        time.sleep(0.2)
        seen.append(works[0].is_completed())

    own.register_abort_hook(1, hook)
    with recording_device.held(torch.accelerator.current_stream()):
        works.append(dist.all_reduce(x, group=own, async_op=True))
        until(lambda: seen)  # nobody waits
        fault_of(lambda: works[0].wait(timedelta(seconds=30)))
    until(lambda: has_failed(own, "cpu"))
    assert seen == [False]


@since(14, "extension of a timeout")
def test_a_timeout_is_extended():
    """Until the first call that has the extension has ended, as the watchdog sees it."""
    own = group(30)
    x = torch.ones(3, device=DEVICE)
    own._add_ephemeral_timeout(timedelta(seconds=5))
    first = dist.all_reduce(x, group=own, async_op=True)
    assert first.timeout == timedelta(seconds=35)
    assert dist.all_reduce(x, group=own, async_op=True).timeout == timedelta(seconds=35)
    assert first.get_future_result().wait() == 0
    assert dist.all_reduce(x, group=own, async_op=True).timeout == timedelta(seconds=30)
    dist.barrier(group=own)


@plays(65)
def test_error_of_the_library():
    own, x = used_group(30)
    if dist.get_rank() == 0:
        inject("async_error allReduce 2 0 1")
    dist.all_reduce(x, group=own)
    until(lambda: has_failed(own))
    text, _ = fault_of(lambda: dist.all_reduce(x, group=own))
    assert "the group failed before: " in text
    assert "NCCL reported an error on communicator of recording:0" in text


def test_refusal_among_several_calls():
    """The library's group is ended too: the calls that this thread makes next are no part of it."""
    own, x = used_group(30)
    if dist.get_rank() == 0:  # rank 1 hears of it, perhaps before its own call
        inject("fail send 2 0 1")
    text, _ = fault_of(lambda: dist.all_to_all_single(torch.empty_like(x), x, group=own))
    assert "injected into send" in text and "(status 2)" in text
    _, y = used_group(30)
    assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("name", ["groupStart", "groupEnd"])
def test_a_batch_that_cannot_begin_or_end(name):
    own, x = used_group(30)
    if dist.get_rank() == 0:
        inject(f"fail {name} 3 0 1")
    text, _ = fault_of(lambda: dist.all_to_all_single(torch.empty_like(x), x, group=own))
    assert "fastcoll.all_to_all [group " in text
    assert f"injected into {name}" in text and "(status 3)" in text


def test_a_batch_with_a_call_that_nccl_lacks():
    """None of its calls is made, and the group lives."""
    own = group(30)
    x = torch.full((4,), dist.get_rank() + 1.0, device=DEVICE)
    y = torch.ones(4, dtype=torch.int16, device=DEVICE)
    dist.all_reduce(torch.ones(4, device=DEVICE), group=own)
    where = torch.device(DEVICE)
    with (
        pytest.raises(TypeError, match=r"got torch\.int16"),
        _coalescing_manager(own, where, async_ops=True),
    ):
        dist.broadcast(x, 0, group=own)
        dist.all_reduce(y, group=own)
    assert x.tolist() == [dist.get_rank() + 1.0] * 4
    dist.all_reduce(x, group=own)
    assert x.tolist() == [3.0] * 4


def test_a_batch_in_progress_is_waited_for():
    own, x = used_group(30)
    y = torch.zeros_like(x)
    inject("in_progress groupEnd 3 0 1")
    dist.all_to_all_single(y, x, group=own)
    assert y.tolist() == [2.0] * 4


def test_a_batch_that_hangs():
    """The watchdog frees the thread that hangs in the end of a batch."""
    own, x = used_group(2)
    if dist.get_rank() == 0:
        inject("hang groupEnd 0 0 1")
    text, took = fault_of(lambda: dist.all_to_all_single(torch.empty_like(x), x, group=own))
    assert "all_to_all(seq 2, float32[4]) timed out after 2000 ms" in text
    assert 1.9 < took < bound(4), took


def test_abort_of_the_group():
    own, x = used_group(30)
    with recording_device.held(torch.accelerator.current_stream()):
        work = dist.all_reduce(x, group=own, async_op=True)
        own.abort()
        text, took = fault_of(work.wait)
    assert "aborted the group" in text and took < bound(1)
