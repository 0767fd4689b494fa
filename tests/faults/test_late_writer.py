"""Memory that a peer may still write into, after a fault that it does not know of, goes to nobody else.

In an all_reduce, and in an all_gather of two, peers write into a rank's ring; in every call they count in its control
block or in a channel. One that is stopped meanwhile goes on some time: then none of it must be another group's by now.
"""

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, shared_bytes, wait_all
from fault_rank import Rank, catch
from in_call import soon
from suite_rules import bound

TIMEOUT = 0.5
RING = 2 << 20
BLOCK = CHANNEL = 32 << 10  # and some lines more
LARGE, SMALL = torch.ones(1 << 18), torch.ones(8)


def new_group(call) -> dist.ProcessGroup:
    group = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=30))
    call(group)
    return group


def destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroys the group of the list and takes it out, so that its memory is given back."""
    dist.destroy_process_group(groups.pop())
    gc.collect()


def kept(before: int) -> int:
    """Returns the bytes above ``before``, once a pooled thread that ends with a group has given back the last of it."""
    until = time.monotonic() + bound(2)
    while shared_bytes() > before and time.monotonic() < until:
        time.sleep(0.01)
    return shared_bytes() - before


def swap(group: dist.ProcessGroup) -> None:
    other = 1 - dist.get_rank()
    wait_all([dist.isend(SMALL, other, group), dist.irecv(torch.empty_like(SMALL), other, group)])


# Each call, and the bytes that its peers may write into.
CALLS = {
    "all_reduce": (lambda group: dist.all_reduce(LARGE.clone(), group=group), RING),
    "all_gather": (
        lambda group: dist.all_gather([LARGE.clone(), LARGE.clone()], LARGE, group=group),
        RING,
    ),
    "small all_reduce": (lambda group: dist.all_reduce(SMALL.clone(), group=group), BLOCK),
    "isend and irecv": (swap, BLOCK + CHANNEL),
}


def silent(rank: Rank, name: str, comes: bool):
    call, _ = CALLS[name]
    rank.used()
    before = shared_bytes()
    groups = [new_group(call)]
    if rank.rank == 0:
        dist.barrier(group=groups[0])
        soon(TIMEOUT, groups[0])
        fault = catch(call, groups[0])
        destroy(groups)
        rank.tell((fault, shared_bytes() - before))
        rank.hear()
    else:
        dist.barrier(group=groups[0])
        rank.hear()
        if comes:
            assert catch(call, groups[0]) is not None
        destroy(groups)
        rank.tell("left")
        rank.hear()
    destroy([new_group(call)])
    dist.barrier()  # the other rank may sleep in that group when this one leaves it
    left = kept(before)
    dist.barrier()
    dist.destroy_process_group()
    return left


IN_SHORT = [("all_reduce", True), ("isend and irecv", False)]
CASES = [
    pytest.param(name, comes, marks=[] if (name, comes) in IN_SHORT else pytest.mark.full)
    for name in CALLS
    for comes in (False, True)
]


@pytest.mark.parametrize(("name", "comes"), CASES)
def test_memory_is_kept_until_the_peer_has_left(jobs, name, comes):
    job = jobs(2, silent, name, comes)
    fault, held = job.hear(0)
    assert "timed out" in fault.text.lower(), fault
    assert held >= CALLS[name][1], (
        "rank 1 has neither left nor read what was published, and may write still"
    )
    job.tell(1)
    assert job.hear(1) == "left"
    job.tell_all()
    left = job.hear_all()
    assert left == {0: 0, 1: 0}


def late_reader(rank: Rank):
    rank.used()
    before = shared_bytes()
    groups = [new_group(swap)]
    dist.barrier()
    if rank.rank == 0:
        dist.send(SMALL, 1, groups[0])
    else:
        rank.hear()
        message = torch.zeros_like(SMALL)
        dist.recv(message, 0, groups[0])
        assert message.equal(SMALL)
    destroy(groups)
    rank.tell(shared_bytes() - before)
    rank.hear()
    left = kept(before)
    dist.destroy_process_group()
    return left


def test_memory_is_kept_for_a_late_reader(jobs):
    """The sender has left the group, and its message is still there. Then the memory is given back."""
    job = jobs(2, late_reader)
    assert job.hear(0) >= BLOCK + CHANNEL
    job.tell(1)
    assert job.hear(1) == 0
    job.tell_all()
    assert job.hear_all() == {0: 0, 1: 0}
