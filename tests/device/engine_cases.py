"""Every call on tensors of a device with streams, as functions that a rank of any world size runs.

The device is the recording one, over a stand-in for NCCL; or, in tests/gpu, a GPU, over NCCL itself.
"""

import os

import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single
from torch.distributed.distributed_c10d import _coalescing_manager

__all__ = ["BETWEEN", "CASES", "DEVICE"]

DEVICE = os.environ.get("FASTCOLL_TEST_DEVICE", "recording:0")
"""Set where ranks are started."""


def sample(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(shape, generator=generator) * 8 - 4).to(dtype)


def mine(*shape, dtype=torch.float32):
    return sample(dist.get_rank(), *shape, dtype=dtype).to(DEVICE)


def ranks():
    return range(dist.get_world_size())


def same(tensor, expected):
    assert tensor.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(tensor.cpu(), expected, rtol=1e-5, atol=1e-5)


def ended(work):
    """Waits as a program does: by stream, unless the call was synchronous."""
    if work is not None:
        work.wait()


def all_reduce(async_op):
    x = mine(1000)
    ended(dist.all_reduce(x, async_op=async_op))
    x += 1  # on the caller's stream
    same(x, sum(sample(rank, 1000) for rank in ranks()) + 1)


def all_reduce_of_strides(async_op):
    x = mine(20, 30)
    ended(dist.all_reduce(x[:, ::3], async_op=async_op))
    expected = sample(dist.get_rank(), 20, 30)
    expected[:, ::3] = sum(sample(rank, 20, 30)[:, ::3] for rank in ranks())
    same(x, expected)


def average(async_op):
    x = mine(77)
    ended(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=async_op))
    same(x, sum(sample(rank, 77) for rank in ranks()) / len(ranks()))


def nothing(async_op):
    x = torch.empty(0, device=DEVICE)
    ended(dist.all_reduce(x, async_op=async_op))
    assert x.numel() == 0


def broadcast(async_op):
    root = len(ranks()) - 1
    x = mine(33, dtype=torch.float64)
    ended(dist.broadcast(x, root, async_op=async_op))
    same(x, sample(root, 33, dtype=torch.float64))


def reduce(async_op):
    x = mine(50)
    ended(dist.reduce(x, 0, async_op=async_op))
    if dist.get_rank() == 0:
        same(x, sum(sample(rank, 50) for rank in ranks()))


def all_gather(async_op):
    outputs = [torch.empty(9, device=DEVICE) for _ in ranks()]
    ended(dist.all_gather(outputs, mine(9), async_op=async_op))
    for rank in ranks():
        same(outputs[rank], sample(rank, 9))


def all_gather_uneven(async_op):
    outputs = [torch.empty(9 + rank, device=DEVICE) for rank in ranks()]
    ended(dist.all_gather(outputs, mine(9 + dist.get_rank()), async_op=async_op))
    for rank in ranks():
        same(outputs[rank], sample(rank, 9 + rank))


def all_gather_into_tensor(async_op):
    output = torch.empty(len(ranks()) * 8, device=DEVICE)
    ended(all_gather_single(output, mine(8), async_op=async_op))
    same(output, torch.cat([sample(rank, 8) for rank in ranks()]))


def reduce_scatter(async_op):
    inputs = list(mine(len(ranks()), 6).unbind())
    inputs = [piece.clone() for piece in inputs]
    output = torch.empty(6, device=DEVICE)
    ended(dist.reduce_scatter(output, inputs, async_op=async_op))
    same(output, sum(sample(rank, len(ranks()), 6)[dist.get_rank()] for rank in ranks()))


def reduce_scatter_uneven(async_op):
    inputs = [mine(6 + rank) for rank in ranks()]
    output = torch.empty(6 + dist.get_rank(), device=DEVICE)
    ended(dist.reduce_scatter(output, inputs, async_op=async_op))
    same(output, sum(sample(rank, 6 + dist.get_rank()) for rank in ranks()))


def reduce_scatter_tensor(async_op):
    output = torch.empty(6, dtype=torch.bfloat16, device=DEVICE)
    whole = torch.arange(6 * len(ranks())).bfloat16()
    ended(reduce_scatter_single(output, whole.to(DEVICE), async_op=async_op))
    same(output, (whole * len(ranks())).chunk(len(ranks()))[dist.get_rank()])


def gather(async_op):
    outputs = [torch.empty(5, device=DEVICE) for _ in ranks()] if dist.get_rank() == 0 else None
    ended(dist.gather(mine(5), outputs, 0, async_op=async_op))
    for rank, output in enumerate(outputs or []):
        same(output, sample(rank, 5))


def scatter(async_op):
    root = len(ranks()) - 1
    inputs = None
    if dist.get_rank() == root:
        inputs = [sample(rank, 5).to(DEVICE) for rank in ranks()]
    output = torch.empty(5, device=DEVICE)
    ended(dist.scatter(output, inputs, root, async_op=async_op))
    same(output, sample(dist.get_rank(), 5))


def all_to_all(async_op):
    inputs = [sample(10 * dist.get_rank() + rank, 4).to(DEVICE) for rank in ranks()]
    outputs = [torch.empty(4, device=DEVICE) for _ in ranks()]
    ended(dist.all_to_all(outputs, inputs, async_op=async_op))
    for rank in ranks():
        same(outputs[rank], sample(10 * rank + dist.get_rank(), 4))


def all_to_all_single_uneven(async_op):
    """Rank a sends a + b rows to rank b."""
    me = dist.get_rank()
    splits = [me + rank for rank in ranks()]
    source = torch.cat([torch.full((me + rank, 2), float(10 * me + rank)) for rank in ranks()])
    output = torch.empty(sum(splits), 2, device=DEVICE)
    ended(dist.all_to_all_single(output, source.to(DEVICE), splits, splits, async_op=async_op))
    same(output, torch.cat([torch.full((me + rank, 2), float(10 * rank + me)) for rank in ranks()]))


def lists(async_op):
    """Coalesced: two tensors, one of them with gaps."""
    a, b = mine(7), mine(3, 4)
    with _coalescing_manager(async_ops=async_op) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b[:, ::2])
    if async_op:
        manager.wait()
    same(a, sum(sample(rank, 7) for rank in ranks()))
    expected = sample(dist.get_rank(), 3, 4)
    expected[:, ::2] = sum(sample(rank, 3, 4)[:, ::2] for rank in ranks())
    same(b, expected)


def batch(async_op):
    """A ring of sends and receives in one batch of the group's stream."""
    me, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(40, device=DEVICE)
    with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        dist.isend(mine(40), (me + 1) % size)
        dist.irecv(output, (me - 1) % size)
    manager.wait()
    same(output, sample((me - 1) % size, 40))


def pairs(async_op):
    """Sends and receives by themselves, while a collective is under way elsewhere."""
    me = dist.get_rank()
    if me == 0:
        (dist.isend(mine(15), 1).wait() if async_op else dist.send(mine(15), 1))
    elif me == 1:
        output = torch.empty(15, device=DEVICE)
        (dist.irecv(output, 0).wait() if async_op else dist.recv(output, 0))
        same(output, sample(0, 15))
    all_reduce(async_op)


def barrier(async_op):
    x = mine(4)
    dist.all_reduce(x)
    ended(dist.barrier(async_op=async_op))
    same(x, sum(sample(rank, 4) for rank in ranks()))


def future(async_op):
    """A callback runs with a stream that waits for the result."""
    x = mine(12)
    doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), 2 * sum(sample(rank, 12) for rank in ranks()))


def dropped(async_op):
    """Memory of a call whose work nobody waits for is not used by others meanwhile."""
    for _ in range(3):
        dist.all_reduce(mine(64), async_op=True)
    all_reduce(async_op)


def objects(async_op):
    """CPU and device in one group."""
    found = [None] * len(ranks())
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": rank} for rank in ranks()]
    cpu = sample(dist.get_rank(), 5)
    dist.all_reduce(cpu)
    torch.testing.assert_close(cpu, sum(sample(rank, 5) for rank in ranks()))
    all_reduce(async_op)


CASES = [
    all_reduce,
    all_reduce_of_strides,
    average,
    nothing,
    broadcast,
    reduce,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_uneven,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single_uneven,
    lists,
    batch,
    pairs,
    barrier,
    future,
    dropped,
    objects,
]

BETWEEN = [batch, pairs]
"""Those that need two ranks."""
