"""After a fault no peer can write into a tensor of the caller's any more.

All-reduce writes results into the messages of all ranks, where they lie in shared memory. A rank that was stopped in
the middle of it may go on long after the others have raised; here a peer plays it, by writing through its own mapping
of the failed rank's memory.
"""

import ctypes
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, shared_bytes
from on_ranks import on_ranks
from oracle import assert_same
from world import here

pytestmark = beyond_gloo("fastcoll's own shared memory")

COUNT = 100_000
BYTES = 4 * COUNT


class Mapping(NamedTuple):
    """A line of /proc/self/maps: addresses, the inode of a fastcoll's memory or 0."""

    start: int
    end: int
    offset: int
    inode: int


def mappings() -> Iterator[Mapping]:
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, offset, _, inode, *name = line.split()
            start, end = (int(part, 16) for part in addresses.split("-"))
            ours = bool(name) and name[0].startswith("/memfd:fastcoll")
            yield Mapping(start, end, int(offset, 16), int(inode) if ours else 0)


def mapping_of(tensor: torch.Tensor) -> Mapping:
    at = tensor.data_ptr()
    return next(one for one in mappings() if one.start <= at < one.end)


def allocate(value: float) -> torch.Tensor:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = backend.allocate_tensor(COUNT, dtype=torch.float, device=torch.device("cpu"))
    return tensor.fill_(value)


def write_late(inode: int, offset: int) -> None:
    """Fill the message of the process with that memory, as a rank that finishes its sums would."""
    there = next(
        one
        for one in mappings()
        if one.inode == inode and one.offset <= offset < one.offset + one.end - one.start
    )
    ctypes.memset(there.start + offset - there.offset, 0x55, BYTES)


def fail_alone():
    """Rank 0 runs an all-reduce that its peer never joins; then the peer writes into its tensor all the same."""
    store, mine = dist.distributed_c10d._get_default_store(), here().rank
    everyone = dist.new_group()
    dist.all_reduce(torch.ones(1), group=everyone)
    # Only now: the ranks may have come slowly.
    everyone._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    tensor, bystander = allocate(3.0), allocate(4.0)
    if mine == 0:
        shared = mapping_of(tensor)
        assert shared.inode != 0
        with pytest.raises(dist.DistBackendError, match="not arrived: rank 1"):
            dist.all_reduce(tensor, group=everyone)
        assert_same(tensor, torch.full((COUNT,), 3.0))
        assert mapping_of(tensor).inode == 0
        assert mapping_of(bystander).inode == shared.inode
        offset = tensor.data_ptr() - shared.start + shared.offset
        store.set("write", f"{shared.inode} {offset}")
        store.wait(["written"])
    else:
        write_late(*map(int, store.get("write").split()))
        store.set("written", "")
    assert_same(tensor, torch.full((COUNT,), 3.0))
    dist.destroy_process_group(everyone)
    return tensor, bystander


@on_ranks(2, fresh=True)
def test_a_late_write_reaches_no_tensor_that_is_used_again():
    tensor, bystander = fail_alone()
    # Still a tensor like any other: through the ring now, on all ranks.
    for shared in (tensor, bystander):
        dist.all_reduce(shared)
        dist.barrier()
    assert_same(tensor, torch.full((COUNT,), 6.0))
    assert_same(bystander, torch.full((COUNT,), 8.0))
    before = shared_bytes()
    del tensor
    assert shared_bytes() <= before - BYTES


@on_ranks(2, fresh=True)
def test_memory_of_a_late_write_is_never_handed_out_again():
    tensor, _ = fail_alone()
    at = tensor.data_ptr()
    del tensor
    others = [allocate(float(number)) for number in range(8)]
    if here().rank == 0:  # where a peer may write at any time
        assert all(not at <= other.data_ptr() < at + BYTES for other in others)
    for other in others:
        dist.all_reduce(other)
    for number, other in enumerate(others):
        assert_same(other, torch.full((COUNT,), 2.0 * number))
