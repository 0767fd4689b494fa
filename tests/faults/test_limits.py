"""What a machine may refuse: memory, descriptors, names in /dev/shm, placement. Groups work, or all ranks are told."""

import os
import re
import resource
import time

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_time import assert_raised, in_time
from machine import memory_limit, refuse_calls, remount_shared_memory
from on_ranks import on_ranks
from over_hosts import over_hosts
from rank_calls import WRONG, transport, works
from suite_rules import bound, full, until

# --- /dev/shm ------------------------------------------------------------------------------------


@over_hosts
@pytest.mark.parametrize(
    "size, fill, read_only",
    [
        pytest.param("64k", False, False, marks=plays(32), id="tiny"),
        pytest.param("1m", True, False, marks=plays(32), id="full"),
        pytest.param("1m", False, True, marks=plays(32), id="read-only"),
    ],
)
@on_ranks(2, world="jobs")
def test_without_room_for_names(rank, size, fill, read_only):
    remount_shared_memory(size, fill, read_only)
    rank.used()
    works(rank)
    rank.finish()


@plays(35)
@over_hosts
@on_ranks(2, world="jobs")
def test_among_squatted_names(rank):
    remount_shared_memory("64m")
    target = rank.scratch / f"target{rank.rank}"
    target.write_text("mine")
    names = ["fastcoll", "fastcoll-0", "default_pg", "0", "torch_1_0", "psm_0", "FSTCOLL1"]
    for name in names:
        os.symlink(target, f"/dev/shm/{name}")
    with open("/dev/shm/sem.fastcoll", "wb") as file:
        file.write(os.urandom(4096))
    listed = sorted(os.listdir("/dev/shm"))
    rank.used()
    works(rank, 1 << 20)
    assert sorted(os.listdir("/dev/shm")) == listed, "a new name"
    assert target.read_text() == "mine", "a link was followed"
    rank.finish()


@plays(64)
@over_hosts
@on_ranks(2, world="jobs")
def test_without_placement(rank):
    refuse_calls("mbind", "set_mempolicy", "get_mempolicy", "madvise", error=1)
    rank.used()
    works(rank, 1 << 20)
    rank.finish()


def in_its_own_world(rank: Rank, value: float):
    rank.used("same", group_name="same")
    for _ in range(200):
        tensor = torch.full((5000,), value)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 2 * value), WRONG
    rank.finish()


@plays(36)
@over_hosts
def test_two_jobs_with_one_name_at_once(jobs):
    both = [jobs(2, in_its_own_world, float(i), prefix=f"job {i}/") for i in (1, 2)]
    for job in both:
        job.hear_all()


# --- memory --------------------------------------------------------------------------------------


def refused_at_once(rank: Rank):
    if rank.rank == 1:
        refuse_calls("fallocate")
    rank.used()
    works(rank)
    assert transport() == "gloo"
    rank.finish()


@plays(33)
@over_hosts
@beyond_gloo("reserves no memory")
def test_ranks_of_which_one_can_have_no_memory_use_gloo(jobs):
    job = jobs.ready(3, refused_at_once)
    assert job.logs().count("hosts, with gloo between them") == 1


def reduces(count: int):
    dist.all_reduce(torch.ones(count))


def reduces_in_a_thread(count: int):
    work = dist.all_reduce(torch.ones(count), async_op=True)
    until(work.is_completed)  # the thread is the library's: no rank waits, which would run it
    work.wait()


def refused_later(rank: Rank, call):
    rank.used()
    if rank.rank == 1:
        refuse_calls("fallocate")
    rank.pause()
    rank.tell(catch(call, 1 << 20))
    rank.hear()  # until all have their error: a rank that leaves is a fault of its own for the others
    assert catch(dist.all_reduce, torch.ones(2)), "a later call was reported as done"
    rank.finish()


@pytest.mark.parametrize(
    "call",
    [pytest.param(reduces, marks=plays(33)), pytest.param(reduces_in_a_thread, marks=plays(12))],
)
@over_hosts
@beyond_gloo("reserves no memory")
def test_memory_that_is_refused_later_is_an_error_on_all_ranks(jobs, call):
    job = jobs.ready(3, refused_later, call)
    start = time.monotonic()
    job.tell_all()
    faults = job.hear_all()
    job.tell_all()
    for fault in faults.values():
        said = "rank 1", "cannot reserve", "No space left", "free memory"
        assert_raised(fault, *said, since=start, within=1.0)


def beyond_the_limit(rank: Rank, cgroup: str):
    """A container's memory limit: there the kernel does not refuse memory, but kills for it."""
    rank.used()
    rank.tell("ready")
    if rank.rank == 1:
        rank.hear()
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        held = backend.allocate_tensor(400 << 20, dtype=torch.uint8, device=torch.device("cpu"))
        held.fill_(1)
        return None
    return catch(dist.all_reduce, torch.ones(3)), rank.recover(1)


@plays(33)
@beyond_gloo("allocates no tensors")
def test_a_rank_that_the_kernel_kills_for_its_memory(jobs):
    with memory_limit(256) as cgroup:
        job = jobs.ready(2, beyond_the_limit, str(cgroup))
        job.tell(1)
        assert job.end(1) == -9
    job.after_fault({0: job.hear(0)}, "died", names=[1])


# --- descriptors and placement -------------------------------------------------------------------


def few_descriptors(rank: Rank, room: int):
    """Rank 1 may open ``room`` more; each rank either succeeds, or has an error that tells it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.listdir("/proc/self/fd")
    if rank.rank == 1:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + room, hard))
    rank.meet()
    fault = catch(rank.used, timeout=2 * bound(2.0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if dist.is_initialized():
        dist.destroy_process_group()
    # Both failed or both worked: else one waits for ever. fastcoll names rank 1 and why on both.
    told = r"rank 1 \(pid \d+, host ", "Too many open files", "Raise the limit on open files"
    patterns = ("open files|Too many",) if IS_GLOO else told
    assert fault is None or all(re.search(pattern, fault.text) for pattern in patterns), fault
    rank.used("again")
    works(rank)
    rank.finish()
    return fault


ROOMS = [
    pytest.param("00", 1, marks=plays(46)),
    *(pytest.param("00", room, marks=[plays(46), pytest.mark.full]) for room in (0, 2, 3, 4)),
    *(pytest.param("01", room, marks=[plays(46), pytest.mark.full]) for room in range(5)),
    # Of 8 ranks that are alone on their hosts each has seven connections, of two sockets.
    *(full("01234567", room) for room in (7, 13, 15, 17, 21)),
]


@pytest.mark.parametrize("hosts, room", ROOMS)
def test_descriptors_run_out(jobs, hosts, room):
    for fault in jobs(len(hosts), few_descriptors, room, hosts=hosts).hear_all().values():
        if fault is not None:
            in_time(fault.seconds, 2.0, fault.text)
