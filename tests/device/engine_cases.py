"""Every call on tensors of a device with streams, as functions that a rank of any world size runs.

The device is the recording one, over a stand-in for NCCL; or, in tests/gpu, a GPU, over NCCL itself.
"""

import dataclasses
import os

import torch
import torch.distributed as dist
from collective_cases import Case, run
from torch.distributed.distributed_c10d import _coalescing_manager

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


def all_gather_uneven(async_op):
    outputs = [torch.empty(9 + rank, device=DEVICE) for rank in ranks()]
    ended(dist.all_gather(outputs, mine(9 + dist.get_rank()), async_op=async_op))
    for rank in ranks():
        same(outputs[rank], sample(rank, 9 + rank))


def reduce_scatter_uneven(async_op):
    inputs = [mine(6 + rank) for rank in ranks()]
    output = torch.empty(6 + dist.get_rank(), device=DEVICE)
    ended(dist.reduce_scatter(output, inputs, async_op=async_op))
    same(output, sum(sample(rank, 6 + dist.get_rank()) for rank in ranks()))


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


@dataclasses.dataclass(frozen=True)
class Checked:
    """A call of the table that all backends share."""

    case: Case

    @property
    def __name__(self) -> str:
        return f"{self.case.collective} of {self.case.given_layout}, {self.case.op}"

    def __call__(self, async_op):
        run(dataclasses.replace(self.case, async_op=async_op, device=DEVICE))


UNEVEN = tuple(tuple(a + b for b in range(3)) for a in range(3))

CASES = [
    *map(
        Checked,
        [
            Case("all_reduce", shape=(1000,)),
            Case("all_reduce", shape=(20, 10), output_layout="step"),
            Case("all_reduce", "AVG", shape=(77,)),
            Case("all_reduce", shape=(0,)),
            Case("broadcast", dtype=torch.double, root=-1),
            Case("reduce"),
            Case("all_gather"),
            Case("all_gather_single"),
            Case("reduce_scatter"),
            Case("reduce_scatter_single", dtype=torch.bfloat16),
            Case("gather"),
            Case("scatter", root=-1),
            Case("all_to_all"),
            Case("all_to_all_single", shape=(1, 2), splits=UNEVEN),
        ],
    ),
    all_reduce,
    all_gather_uneven,
    reduce_scatter_uneven,
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
