"""Collectives of tensors on a device with streams: results, and the order of all accesses.

The engine runs as on a GPU: CuPy calls a stand-in for NCCL, and the device is one of host memory that
checks the order of streams. Every call here is followed by the check that nothing was out of order.
"""

import contextlib

import pytest
import recording_device
import torch
import torch.distributed as dist

DEVICE = "recording:0"


def sample(rank, count=1000, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(count, generator=generator) * 8 - 4).to(dtype)


def on_device(rank, count=1000, dtype=torch.float32):
    return sample(rank, count, dtype).to(DEVICE)


def everyone():
    return range(dist.get_world_size())


def in_order(case):
    """Runs a case with the check."""

    def run(*arguments):
        recording_device.clear()
        with recording_device.no_violations():
            case(*arguments)

    run.__name__ = run.__qualname__ = case.__name__
    run.__module__ = case.__module__
    return run


def all_reduce(async_op):
    x = on_device(dist.get_rank())
    work = dist.all_reduce(x, async_op=async_op)
    if async_op:
        work.wait()
    x += 1
    expected = sum(sample(rank) for rank in everyone()) + 1
    torch.testing.assert_close(x.cpu(), expected)


CASES = [all_reduce]


def check(case, *arguments):
    recording_device.clear()
    with recording_device.no_violations():
        case(*arguments)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_reduce(nccl_world, ranks, async_op):
    nccl_world(ranks).run(check, all_reduce, async_op)
