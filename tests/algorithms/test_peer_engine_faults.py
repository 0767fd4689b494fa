"""A rank that never comes: the error names it, and the group fails like after any other fault."""

import contextlib
import gc
import threading
import time
import weakref
from functools import partial

import device_calls
import peer_memory
import pytest
import quick_interpreter
import torch
import torch.distributed as dist
from device_ranks import fault_of, has_failed, used_group
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import bound, full, until
from world import here

pytestmark = on_ranks(2, world="peer_world")


def error_of_next_call(group):
    text, _ = fault_of(lambda: dist.all_reduce(torch.ones(5, device=DEVICE), group=group))
    return text


@pytest.mark.parametrize("algorithm", ["one_shot", full("two_shot"), "ring"])
@on_ranks(3, world="peer_world")
def test_a_kernel_that_gives_up_fails_the_group_on_all_ranks(algorithm):
    """The limit of its waits is reached before the group's timeout."""
    group, x = used_group(120, 700)
    reduces = peer_memory.reduces_of(group)
    reduces.region.peers.buffers.seconds = 2.0
    reduces.plans.forget()
    if dist.get_rank() != 1:
        device_calls.all_reduce(x, group=group, algorithm=algorithm)
    until(lambda: has_failed(group))
    text = error_of_next_call(group)
    y = torch.ones(5, device=DEVICE)
    dist.all_reduce(y)  # the default group lives
    assert y.cpu().eq(3).all()
    assert f"[group '{group.group_name}', rank {dist.get_rank()}/3" in text
    named = "expected rank 1 " in text or "Not launched at all on rank 1." in text
    assert named and "a kernel timed out (channel " in text and ", got no sign of it." in text
    assert dist.get_rank() != 1 or "another rank met a fault: rank " in text


def test_the_watchdogs_deadline_ends_a_kernel_that_waits():
    """As on a GPU: the kernel would wait for longer than the group's timeout, and is let go."""
    group, x = used_group(1.5, 700)
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(x, group=group, async_op=True).wait()
            dist.all_reduce(x, group=group)
        text = str(caught.value)
        assert "timed out after 1500 ms" in text and "rank 1 completed call 1 of 1" in text
    else:
        until(lambda: has_failed(group))
        text = error_of_next_call(group)
        assert "another rank met a fault: rank 0: all_reduce(seq 2" in text
    assert f"[group '{group.group_name}', rank {dist.get_rank()}/2" in text
    assert time.monotonic() - start < bound(5)


def test_the_memory_goes_with_the_group():
    group = dist.new_group()
    x = torch.ones(700, device=DEVICE)
    for _ in range(3):
        dist.all_reduce(x, group=group)
    reduces = peer_memory.reduces_of(group)
    buffers = reduces.region.peers.buffers
    memory = buffers.memory
    assert len(reduces.plans.values()) == 1
    assert not hasattr(memory, "freed")
    dist.destroy_process_group(group)
    assert buffers.closed and memory.freed
    assert reduces.region.peers is None and not reduces.plans.values()
    gone = weakref.ref(memory)
    del memory, buffers, reduces, group
    gc.collect()
    assert gone() is None, gc.get_referrers(gone())


def waits_end(buffers):
    """Whether kernels that wait are let go, and those to come."""
    return int(buffers.words[0]) == 1


def test_the_memory_of_an_aborted_group_stays():
    """What a kernel may still read stays mapped."""
    group, _ = used_group(count=700)
    buffers = peer_memory.reduces_of(group).region.peers.buffers
    group._get_backend(torch.device(DEVICE)).abort()
    text = error_of_next_call(group)
    assert "abort" in text
    until(partial(waits_end, buffers))
    memory = weakref.ref(buffers.memory)
    del buffers
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert memory() is not None and not hasattr(memory(), "freed")


def test_a_kernel_that_waits_is_let_go_when_its_group_is_destroyed_at_once():
    """A kernel that waits ends with its group, and so does one that is launched later."""
    group, x = used_group(count=700)
    buffers = peer_memory.reduces_of(group).region.peers.buffers
    errors = []

    def launch():
        try:
            dist.all_reduce(x, group=group)
        except dist.DistBackendError as error:  # the group's end may come before the launch's
            errors.append(error)

    waiting = threading.Thread(target=launch, daemon=True)
    if dist.get_rank() == 0:
        before = quick_interpreter.polls[0]
        waiting.start()
        until(lambda: quick_interpreter.polls[0] > before + 10)  # the kernel waits
        assert waiting.is_alive()
    here().meet("the kernel waits")
    group._get_backend(torch.device(DEVICE)).abort()
    with contextlib.suppress(dist.DistBackendError):  # the call that was under way
        dist.destroy_process_group(group)
    until(partial(waits_end, buffers))
    if dist.get_rank() == 0:
        waiting.join(20)
        assert not waiting.is_alive()
