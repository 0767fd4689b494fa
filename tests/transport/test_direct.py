"""Messages that lie in shared memory are read where they are, without the ring.

That the ring was not used shows in the memory that the process holds: it is reserved at its first use.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, beyond_gloo, reduce_scatter_single, shared_bytes
from collective_cases import Case, Runner
from on_ranks import on_ranks
from oracle import assert_reduced, assert_same, sample
from world import here

pytestmark = beyond_gloo("fastcoll's own shared memory")

COUNT = 300_001  # elements of each rank; several segments, the last one odd
RING = 2 << 20


def place(tensor: torch.Tensor, shared: bool) -> torch.Tensor:
    """Return a copy, in shared memory or not."""
    if not shared:
        return tensor.clone()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    copy = backend.allocate_tensor(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return copy.view(tensor.shape).copy_(tensor)


def all_gather_in_place(shared, dtype):
    inputs = [sample(rank, (COUNT,), dtype) for rank in range(here().size)]
    output = place(torch.zeros(here().size, COUNT, dtype=dtype), shared)
    output[here().rank] = inputs[here().rank]
    all_gather_single(output.view(-1), output[here().rank])
    assert_same(output, torch.stack(inputs))
    return output


def reduce_scatter_in_place(shared, dtype):
    inputs = [sample(rank, (here().size, COUNT), dtype) for rank in range(here().size)]
    tensor = place(inputs[here().rank], shared)
    reduce_scatter_single(tensor[here().rank], tensor)
    assert_reduced(tensor[here().rank], [rows[here().rank] for rows in inputs], "SUM")
    return tensor


CALLS = [
    Case("all_reduce", shape=(COUNT,), output_layout="shared"),
    Case("all_gather_single", shape=(COUNT,), given_layout="shared"),
    Case("reduce_scatter_single", shape=(COUNT,), given_layout="shared"),
    Case("broadcast", shape=(COUNT,), output_layout="shared", root=1),
    # Rank r sends COUNT + r + 3 * to elements to rank `to`.
    Case(
        "all_to_all_single",
        shape=(1,),
        given_layout="shared",
        splits=tuple(tuple(COUNT + r + 3 * to for to in range(3)) for r in range(3)),
    ),
    all_gather_in_place,
    reduce_scatter_in_place,
]

each_call = pytest.mark.parametrize(
    "call", CALLS, ids=lambda call: getattr(call, "collective", None) or call.__name__
)


def checked(call, shared, dtype):
    """Return the tensor that lies in shared memory, or would, of a call that gave what it must."""
    if not isinstance(call, Case):
        return call(shared, dtype)
    elsewhere = {} if shared else {"given_layout": "contiguous", "output_layout": "contiguous"}
    runner = Runner(dataclasses.replace(call, dtype=dtype, **elsewhere))
    runner.check()
    return runner.given[0][0] if runner.given else runner.outputs[0]


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16], ids=["float", "bfloat16"])
@each_call
@on_ranks(2, 3, fresh=True)
def test_read_where_it_is(call, dtype):
    dist.barrier()
    before = shared_bytes()
    for _ in range(3):
        tensor = checked(call, True, dtype)
        held = tensor.untyped_storage().nbytes()
        assert shared_bytes() <= before + held + (1 << 16), "the ring was reserved"
        tensor.fill_(0)  # a peer that still read would get zeros
        del tensor


@each_call
@on_ranks(2, 3, fresh=True)
def test_one_message_elsewhere(call):
    """Then all go through the ring."""
    root = 1  # whose memory decides alone in a broadcast
    dist.barrier()
    before = shared_bytes()
    broadcast = getattr(call, "collective", "") == "broadcast"
    for _ in range(2):
        checked(call, here().rank != root, torch.float)
    assert shared_bytes() >= before + (RING if not broadcast or here().rank == root else 0)


@on_ranks(2, 3)
def test_sizes_around_the_limit():
    """Messages too small for it, on the way from one path to the other."""
    for count in (1, 8191, 8192, 8193, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        inputs = [sample(rank, (count,), torch.float) for rank in range(here().size)]
        tensor = place(inputs[here().rank], True)
        dist.all_reduce(tensor)
        assert_reduced(tensor, inputs, "SUM")


@on_ranks(2, 3, 4)
def test_parts_of_a_tensor():
    """Pieces that begin within a cache line, next to bytes that are none of the message."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float):
        for count in (40_003, 300_001):
            inputs = [sample(rank, (count + 7,), dtype) for rank in range(here().size)]
            there = place(inputs[here().rank], True)
            dist.all_reduce(there[3:-4])
            assert_reduced(there[3:-4], [one[3:-4] for one in inputs], "SUM")
            assert_same(there[:3], inputs[here().rank][:3])
            assert_same(there[-4:], inputs[here().rank][-4:])
