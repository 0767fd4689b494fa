"""Collectives of tensors on a device with streams: results, and the order of all accesses.

The engine runs as on a GPU: CuPy calls a stand-in for NCCL, and the device is one of host memory that
checks the order of streams. Every case here also checks that nothing was out of order.
"""

import pytest
import recording_device
import torch
import torch.distributed as dist
from engine_cases import BETWEEN, CASES, DEVICE


def check(case, *arguments):
    recording_device.clear()
    with recording_device.no_violations():
        case(*arguments)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_results_and_order(nccl_world, case, async_op):
    sizes = (2, 3) if case in BETWEEN else (1, 2, 3)
    for size in sizes:
        nccl_world(size).run(check, case, async_op)


def read_without_waiting():
    x = torch.ones(100, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    x += 1
    work.wait()
    assert {found.kind for found in recording_device.violations()} == {"race"}
    recording_device.clear()


def test_the_check_finds_a_missing_wait(nccl_world):
    nccl_world(2).run(read_without_waiting)
