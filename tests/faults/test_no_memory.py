"""Point-to-point is the first call of a group of which one rank can have no shared memory.

Collectives agree on Gloo then. Two ranks alone do not, for the other may have put its message into shared memory
already: both get an error that says who lacks what, and what to do.
"""

import ctypes
import errno
import itertools
import re
import resource
import threading

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, wait_all
from fault_list import plays
from fault_rank import Rank, catch
from in_call import tell_in_call
from in_time import assert_raised
from machine import refuse_calls
from rank_calls import transport, works

pytestmark = beyond_gloo("reserves no shared memory")

NOTICED = 1.0


def full_memory():
    refuse_calls("fallocate")


def no_memfd():
    """As a strict seccomp profile does."""
    refuse_calls("memfd_create", error=errno.ENOSYS)


def file_size_limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def address_space_limit():
    """What is mapped now and 60 MiB: the least arena needs 64; a thread's stack takes 1 MiB, not 8 as usual."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    # Of malloc.h: an arena of another thread would take 64 MiB as soon as something gave back 4.
    arena_max = -8
    assert libc.mallopt(arena_max, 1) == 1
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 20)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + (60 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def exchange(rank: Rank, sender: int):
    tensor = torch.ones(5)
    if rank.rank == sender:
        # A message of this size ends when the receiver has it, not before.
        dist.send(torch.ones(1 << 20), 1 - sender)
    else:
        dist.recv(tensor.new_empty(1 << 20), 1 - rank.rank)


def first_call(rank: Rank, victim: int, sender: int, limit):
    rank.init()
    if rank.rank == victim:
        limit()
    rank.pause()
    rank.tell(catch(exchange, rank, sender))
    assert catch(dist.all_reduce, torch.ones(3)), "a group that failed works"
    rank.finish()
    # The next group's first call is a collective. What the first one's threads took of the limit is granted anew.
    if rank.rank == victim and limit is address_space_limit:
        limit()
    rank.used("again")
    works(rank)
    assert transport() == "gloo"
    dist.destroy_process_group()


LIMITS = [full_memory, no_memfd, file_size_limit, address_space_limit]
IN_SHORT = [(limit, i % 2, i > 1) for i, limit in enumerate(LIMITS)]
CASES = [
    pytest.param(*case, marks=[] if case in IN_SHORT else pytest.mark.full)
    for case in itertools.product(LIMITS, [0, 1], [False, True])
]


@plays(33)
@pytest.mark.parametrize(("limit", "sender", "late"), CASES)
def test_first_call_is_point_to_point(jobs, limit, sender, late):
    victim = 1
    job = jobs.ready(2, first_call, victim, sender, limit)
    job.tell(0 if late else victim)
    faults = {} if late else {victim: job.hear(victim)}
    job.tell(victim if late else 0)
    faults |= job.hear_all(but=faults)
    for rank, fault in faults.items():
        call = f"fastcoll.{'send' if rank == sender else 'recv'} [group '0', rank {rank}/2"
        said = call, job.name(victim), "has no shared memory", "FASTCOLL_SHARED_MEMORY=off"
        assert_raised(fault, *said, within=NOTICED)
        assert re.search(r"\d+ bytes of shared memory|memfd_create", fault.text), fault.text
    job.hear_all()


def later_calls(rank: Rank):
    """The first message goes; then rank 0 can have no ring for long ones."""
    rank.init()
    tensor = torch.ones(5)
    for source in (0, 1):
        dist.send(tensor, 1 - source) if rank.rank == source else dist.recv(tensor, source)
    if rank.rank == 0:
        refuse_calls("fallocate")
    for count in (513, 1000, 20_000, 1 << 20):
        sent = torch.arange(count, dtype=torch.float32)
        for source in (0, 1):
            received = torch.empty(count)
            if rank.rank == source:
                works = [dist.isend(sent * sign, 1 - source) for sign in (1, -1)]
            else:
                works = []
                for sign in (1, -1):
                    dist.recv(received, source)
                    assert torch.equal(received, sent * sign), (count, source, sign)
            wait_all(works)
    rank.finish()


def test_long_messages_without_memory_for_their_ring(jobs):
    job = jobs.ready(2, later_calls)
    logs = job.logs()
    assert logs.count("messages to rank 1 are slow: ") == 1, logs
    assert "cannot reserve 2097152 bytes of shared memory" in logs, logs


def pairs(rank: Rank):
    """Ranks 2 and 3 talk all the same, until they meet one that failed."""
    rank.init()
    if rank.rank == 1:
        refuse_calls("fallocate")
    fault = catch(exchange, rank, 0) if rank.rank < 2 else None
    if rank.rank >= 2:
        tensor = torch.ones(5)
        dist.send(tensor, 3) if rank.rank == 2 else dist.recv(tensor, 2)
    rank.tell(fault)
    rank.hear()
    fault = catch(dist.recv, torch.ones(5), 1) if rank.rank >= 2 else None
    rank.tell(fault)
    rank.hear()
    rank.finish()


def test_ranks_that_come_later_hear_of_it(jobs):
    job = jobs(4, pairs)
    first = job.hear_all()
    assert first[2] is None and first[3] is None
    job.tell_all()
    later = job.hear_all()
    for fault in (first[0], first[1], later[2], later[3]):
        assert_raised(fault, job.name(1), "has no shared memory", within=NOTICED)
    job.tell_all()
    job.hear_all()


def no_threads(rank: Rank):
    """Two threads of rank 0 call a collective when no thread can be started any more."""
    rank.used()
    x, y = torch.ones(3), torch.ones(3)
    if rank.rank == 1:
        rank.hear()
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x.tolist(), y.tolist(), []
    faults = []
    first = threading.Thread(target=lambda: faults.append(catch(dist.all_reduce, x)))
    go = threading.Event()
    second = threading.Thread(target=lambda: (go.wait(), faults.append(catch(dist.all_reduce, y))))
    second.start()
    tell_in_call(rank)
    first.start()
    rank.hear()  # it is in its call
    refuse_calls("clone", "clone3", error=errno.EAGAIN)
    go.set()
    rank.tell("second")
    second.join()
    first.join()
    return x.tolist(), y.tolist(), faults


def test_a_call_that_waits_behind_another_needs_no_thread(jobs):
    job = jobs(2, no_threads)
    assert job.hear(0) == "in call"
    job.tell(0)
    assert job.hear(0) == "second"
    job.tell(1)
    assert job.hear_all() == {
        0: ([2.0] * 3, [2.0] * 3, [None, None]),
        1: ([2.0] * 3, [2.0] * 3, []),
    }
