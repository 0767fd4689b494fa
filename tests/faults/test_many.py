"""Many groups, many works, many threads."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, shared_bytes
from fault_list import plays
from fault_rank import Rank, footprint
from in_time import in_time
from on_ranks import on_ranks
from own_memory import allocated_bytes
from own_threads import in_threads
from rank_calls import WRONG

# --- threads -------------------------------------------------------------------------------------


def one_group_unordered(rank: Rank):
    """Two threads whose collectives can be told apart: of other sizes, and of other kinds."""
    rank.used()

    def first():
        for _ in range(300):
            tensor = torch.full((10,), 1.0)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 10, WRONG

    def second():
        for _ in range(300):
            tensor = torch.full((70_000,), 5.0 if rank.rank else 3.0)
            dist.broadcast(tensor, 0)
            assert torch.all(tensor == 3.0), WRONG

    start = time.monotonic()
    raised = in_threads(first, second)
    return [(type(error).__name__, str(error)) for error in raised], time.monotonic() - start


@plays(29)
def test_two_threads_on_one_group(jobs):
    """An error or the right result, never a crash, a hang or a wrong number."""
    for raised, seconds in jobs(2, one_group_unordered).hear_all(timeout=40).values():
        in_time(seconds, 5.0, raised[0][1] if raised else "")
        for kind, text in raised:
            assert kind == "DistBackendError", text
            assert "mismatch between collectives" in text or "left the group" in text, text


# --- groups --------------------------------------------------------------------------------------


def many_groups(rank: Rank, count, use, held):
    """No thread; no file but two sockets each between hosts; at most 64 KiB of memory besides the group's own block.

    Unused they have no memory.
    """
    rank.used()
    dist.barrier()
    one = footprint()
    groups = [dist.new_group([0, 1]) for _ in range(count)]
    if use:
        for group in groups:
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0] * 5
    more = footprint().beyond(one)
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    memory = shared_bytes()
    for group in groups[:: count // 10]:
        dist.all_reduce(tensor, group=group)
    for group in groups:
        dist.destroy_process_group(group)
    del groups, group
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0**12] * 5
    after = footprint().beyond(one)
    kept = shared_bytes()
    dist.destroy_process_group()
    # Groups in use share workers.
    assert {t for t in more if not (use and "thread fastcoll-work x" in t)} == held, more
    assert (after, rank.left()) == ([], [])
    assert memory < ((count + 1) * (128 << 10) if use else 1 << 20), memory
    assert kept < 4 << 20, kept


@pytest.mark.parametrize(
    "hosts, count, use, held",
    [
        pytest.param("00", 300, True, set(), marks=plays(43)),
        pytest.param("01", 300, True, {"file socket x600"}, marks=[plays(43), pytest.mark.full]),
        pytest.param(
            *("00", 1000, False, set()), marks=beyond_gloo("opens sockets and threads for each")
        ),
    ],
)
def test_many_groups(jobs, hosts, count, use, held):
    jobs(2, many_groups, count, use, held, hosts=hosts).hear_all(timeout=60)


# --- works ---------------------------------------------------------------------------------------


@plays(44)
@on_ranks(2, world="jobs")
def test_many_works(rank):
    rank.used()
    dist.barrier()
    if rank.rank == 1:
        time.sleep(0.3)
    tensors = [torch.full((17,), float(i)) for i in range(2000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):  # in any order
        work.wait()
    expected = 2 * torch.arange(2000.0)[:, None].expand(2000, 17)
    assert torch.equal(torch.stack(tensors), expected), WRONG
    del work, works
    dist.barrier()
    rank.finish()


# --- for a long time -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [20, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_init_and_destroy_over_and_over(jobs, count):
    jobs(2, init_and_destroy, count).hear_all(timeout=30 + 0.5 * count)


def init_and_destroy(rank: Rank, count):
    rank.used("warm")
    dist.all_reduce(torch.ones(1 << 18), async_op=True).wait()
    dist.destroy_process_group()
    assert rank.left() == []
    rank.before, memory, blocks = footprint(), allocated_bytes(), sys.getallocatedblocks()
    for i in range(count):
        rank.used(f"round {i}")
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        assert tensor[0] == rank.size
        dist.destroy_process_group()
    # The kernel lists a thread for a moment after it was joined.
    assert rank.left() == []
    del tensor
    # torch itself keeps 200 bytes and 5 blocks of each group.
    grown, more = allocated_bytes() - memory, sys.getallocatedblocks() - blocks
    assert grown < (64 << 10) + 1024 * count, f"{grown} bytes more after {count} rounds"
    assert more < 1000 + 20 * count, f"{more} of Python's blocks more after {count} rounds"
