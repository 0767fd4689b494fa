"""FASTCOLL_STORES: segments of a ring written plainly, past the caches, and in turns, are the same bits."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from collective_cases import Case, run_all
from on_ranks import on_ranks
from oracle import assert_reduced, sample
from test_direct import CALLS as CALLS_FROM_SHARED_MEMORY
from test_direct import checked
from world import here, init_group

import fastcoll
import fastcoll.info

pytestmark = beyond_gloo("fastcoll's own shared memory")

COUNT = 150_003  # elements of each rank; of either type more bytes than the ring has
RING = 256 << 10


TABLE = [
    Case("broadcast", shape=(COUNT,), root=1),
    Case("gather", shape=(COUNT,), root=1),
    Case("scatter", shape=(COUNT,)),
    Case("reduce", shape=(COUNT,)),
    # Messages that end before the longest, and none at all.
    Case(
        "all_to_all_single",
        shape=(1,),
        splits=tuple(tuple(COUNT * ((r + to) % 3) // 2 + to for to in range(3)) for r in range(3)),
    ),
    *(Case("ring", shape=(count,)) for count in (COUNT, 40_001, 70_000, COUNT - 1)),
]


def from_private_memory(dtype):
    """The calls of test_direct, whose messages make several segments too, through the ring."""
    for call in CALLS_FROM_SHARED_MEMORY:
        checked(call, False, dtype)


def of_the_table(dtype):
    run_all(dataclasses.replace(case, dtype=dtype) for case in TABLE)


def coalesced(counts, dtype, wire=None):
    ranks = range(here().size)
    inputs = [[sample(rank + 7 * i, (n,), dtype) for i, n in enumerate(counts)] for rank in ranks]
    tensors = [tensor.clone() for tensor in inputs[here().rank]]
    fastcoll.all_reduce_coalesced(tensors, wire_dtype=wire)
    for i, tensor in enumerate(tensors):
        given = [inputs[rank][i].to(wire or dtype) for rank in ranks]
        assert_reduced(tensor.to(wire or dtype), given, "SUM")


def scattered(dtype):
    """One message of many tensors, so that pieces begin and end anywhere."""
    coalesced([COUNT // 3, 1, 63, 0, 4097, COUNT // 2], dtype)


def narrowed(dtype):
    """float32 that travels in 16 bits: the ring is written by the cast."""
    coalesced([COUNT // 2, 5, COUNT], torch.float32, dtype)


CALLS = [from_private_memory, of_the_table, scattered, narrowed]
DTYPES = [torch.float, torch.bfloat16]


def used() -> str:
    """Of the newest group: those of earlier tests may live on in a process that is used again."""
    return [group["stores"] for group in fastcoll.info.groups() if "stores" in group][-1]


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
@on_ranks(2, 3, init=False)
def test_exact(stores, call, dtype):
    """`stores`: of each rank, which need not agree."""
    os.environ["FASTCOLL_STORES"] = stores[here().rank % len(stores)]
    os.environ["FASTCOLL_RING_BYTES"] = str(RING)
    init_group(seconds=60)
    dist.all_reduce(torch.ones(COUNT))
    assert used() == stores[here().rank % len(stores)]
    call(dtype)
    dist.destroy_process_group()
