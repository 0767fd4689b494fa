"""A rank that waits for a long time sleeps: it leaves its core to others."""

import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from fault_list import plays
from world import here

pytestmark = beyond_gloo("fastcoll's own waiting")

SECONDS = 1.5
MOST = 0.05
"""Share of a core that a waiting rank may use, of all its threads together."""


def all_reduce():
    dist.all_reduce(torch.ones(3))


def large_all_reduce():
    dist.all_reduce(torch.ones(1 << 20))


def asynchronous():
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def barrier():
    dist.barrier()


def receive():
    if here().rank == 0:
        for peer in range(1, here().size):
            dist.send(torch.ones(3), peer)
    else:
        dist.recv(torch.ones(3), 0)


def waits(call):
    call()  # connected
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    if here().rank == 0:
        time.sleep(SECONDS)
        call()
        return 0.0
    call()
    waited = time.perf_counter() - began
    assert waited > SECONDS / 2, "it did not wait for rank 0"
    return (time.process_time() - used) / waited


CASES = [
    pytest.param(
        call, size, marks=plays(42) if (call, size) == (all_reduce, 2) else pytest.mark.full
    )
    for call in (all_reduce, large_all_reduce, asynchronous, barrier, receive)
    for size in (2, 4)
]


@pytest.mark.parametrize(("call", "size"), CASES)
def test_waiting_takes_no_core(world, call, size):
    shares = world(size).run(waits, call)
    assert max(shares) < MOST, shares
