"""FASTCOLL_STORES: segments of a ring written plainly, past the caches, and in turns, are the same bits."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, beyond_gloo, name_of
from oracle import assert_reduced, assert_same, sample
from test_direct import CALLS as CALLS_FROM_SHARED_MEMORY
from world import here

import fastcoll
import fastcoll.info

pytestmark = beyond_gloo("fastcoll's own shared memory")

COUNT = 1_100_003  # elements of each rank; of either type more bytes than the ring has


def from_private_memory(dtype):
    """The calls of test_direct, whose messages make several segments too, through the ring."""
    for call in CALLS_FROM_SHARED_MEMORY:
        call(False, dtype)


def send_and_recv(dtype):
    mine, size = here().rank, here().size
    after, before = (mine + 1) % size, (mine - 1) % size
    for count in (COUNT, 40_001, 70_000, COUNT - 1):
        tensor = torch.zeros(count, dtype=dtype)
        work = dist.isend(sample(mine, (count,), dtype), after)
        dist.recv(tensor, before)
        work.wait()
        assert_same(tensor, sample(before, (count,), dtype))


def rooted(dtype):
    mine, ranks = here().rank, range(here().size)
    rows = [sample(rank, (COUNT,), dtype) for rank in ranks]
    tensor = rows[mine].clone()
    dist.broadcast(tensor, 1)
    assert_same(tensor, rows[1])
    gathered = [torch.zeros_like(row) for row in rows]
    dist.gather(rows[mine], gathered if mine == 1 else None, 1)
    if mine == 1:
        assert_same(torch.stack(gathered), torch.stack(rows))
    dist.scatter(tensor.zero_(), rows if mine == 0 else None, 0)
    assert_same(tensor, rows[mine])
    tensor = rows[mine].clone()
    dist.reduce(tensor, 0)
    if mine == 0:
        assert_reduced(tensor, rows, "SUM")


def uneven(dtype):
    """Messages that end before the longest, and none at all."""
    mine, size = here().rank, here().size
    splits = [[COUNT * ((r + to) % 3) // 2 + to for to in range(size)] for r in range(size)]
    inputs = [sample(r, (sum(splits[r]),), dtype) for r in range(size)]
    expected = [inputs[r].split(splits[r])[mine] for r in range(size)]
    output = torch.zeros(sum(part.numel() for part in expected), dtype=dtype)
    received = [part.numel() for part in expected]
    dist.all_to_all_single(output, inputs[mine], received, splits[mine])
    assert_same(output, torch.cat(expected))


def scattered(dtype):
    """One message of many tensors, so that pieces begin and end anywhere."""
    counts = [COUNT // 3, 1, 63, 0, 4097, COUNT // 2]
    ranks = range(here().size)
    inputs = [[sample(rank + 7 * i, (n,), dtype) for i, n in enumerate(counts)] for rank in ranks]
    tensors = [tensor.clone() for tensor in inputs[here().rank]]
    fastcoll.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        assert_reduced(tensor, [inputs[rank][i] for rank in ranks], "SUM")


def narrowed(dtype):
    """float32 that travels in 16 bits: the ring is written by the cast."""
    counts = [COUNT // 2, 5, COUNT]
    ranks = range(here().size)
    inputs = [
        [sample(rank + 7 * i, (n,), torch.float32) for i, n in enumerate(counts)] for rank in ranks
    ]
    tensors = [tensor.clone() for tensor in inputs[here().rank]]
    fastcoll.all_reduce_coalesced(tensors, wire_dtype=dtype)
    for i, tensor in enumerate(tensors):
        assert_reduced(tensor.to(dtype), [inputs[rank][i].to(dtype) for rank in ranks], "SUM")


CALLS = [from_private_memory, send_and_recv, rooted, uneven, scattered, narrowed]
DTYPES = [torch.float, torch.bfloat16]


def used() -> str:
    """Of the newest group: those of earlier tests may live on in a process that is used again."""
    return [group["stores"] for group in fastcoll.info.groups() if "stores" in group][-1]


def with_stores(stores, call, dtype):
    """`stores`: of each rank, which need not agree."""
    os.environ["FASTCOLL_STORES"] = stores[here().rank % len(stores)]
    store = dist.FileStore(f"{here().scratch}/stores", here().size)
    try:
        dist.init_process_group(
            BACKEND,
            store=store,
            rank=here().rank,
            world_size=here().size,
            timeout=timedelta(seconds=60),
        )
    finally:
        del os.environ["FASTCOLL_STORES"]
    dist.all_reduce(torch.ones(COUNT))
    now = used()
    call(dtype)
    dist.destroy_process_group()
    return now


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (call, dtype)
        for call in CALLS
        for dtype in DTYPES
        if call is not narrowed or dtype.itemsize == 2
    ],
    ids=name_of,
)
@pytest.mark.parametrize(
    "stores",
    [["streaming"], ["plain"], ["plain", "streaming"]],
    ids=["streaming", "plain", "mixed"],
)
def test_exact(world, stores, call, size, dtype):
    found = world(size).run(with_stores, stores, call, dtype, init=False)
    assert found == [stores[rank % len(stores)] for rank in range(size)]
