"""Rows 65 to 68: device tensors, on the recording device and the stand-in for NCCL.

What is injected, and what each rank must see, is in tests/device; the rows play those cases in processes
whose end, and what they leave, is looked at.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import device_ranks
import torch
import torch.distributed as dist
from fault_rank import Rank, footprint
from matrix_row import NotPlayed, Outcome, Stage, row, worst
from world_rank import Function

DEVICE_TESTS = Path(__file__).resolve().parents[2] / "device"
sys.path.append(str(DEVICE_TESTS))

from test_device_capture import aborted_while_captured  # noqa: E402
from test_device_faults import (  # noqa: E402
    error_of_the_library,
    hang_in_the_library,
    hang_on_the_device,
    init_that_fails,
    init_that_hangs,
)

__all__: list[str] = []


def played(stage: Stage, *cases: Callable[[], None]) -> Outcome:
    """Play cases of tests/device on two ranks."""
    if not stage.native:
        raise NotPlayed("the stand-in is NCCL's, and gloo does not call it")
    device_ranks.build()
    found = []
    for case in cases:
        name = Function(case.__module__, case.__code__.co_filename, case.__qualname__)
        job = stage.jobs(2, on_the_device, name)
        found += [stage.checks(job, timeout=60.0), stage.ended(job)]
    return worst(found)


def on_the_device(rank: Rank, name: Function):
    device_ranks.prepare()
    rank.init("before")
    dist.all_reduce(torch.ones(3, device=f"{device_ranks.DEVICE}:0"))  # loads what stays loaded
    dist.destroy_process_group()
    rank.before = footprint()
    rank.init("faulty")
    start = time.monotonic()
    name.load()()
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    left = rank.left()
    # What hangs inside the library is left behind, for nothing could end it.
    return {"seconds": seconds, "left": [text for text in left if not text.startswith("thread ")]}


@row(
    65,
    "CUDA: an asynchronous error of NCCL (stand-in)",
    "error that names communicator and device; nothing left",
    "test_device_faults.py::test_fault",
)
def asynchronous_error(stage: Stage) -> Outcome:
    return played(stage, error_of_the_library)


@row(
    66,
    "CUDA: a call that hangs in NCCL; a stream that hangs (stand-in)",
    "timeout that names the call and how far each rank came",
    "test_device_faults.py::test_fault",
)
def hangs(stage: Stage) -> Outcome:
    return played(stage, hang_in_the_library, hang_on_the_device)


@row(
    67,
    "CUDA: NCCL's init fails or hangs on one rank (stand-in)",
    "both ranks name rank and status, or give up in time",
    "test_device_faults.py::test_fault",
)
def failing_init(stage: Stage) -> Outcome:
    return played(stage, init_that_fails, init_that_hangs)


@row(
    68,
    "CUDA: an abort while a graph is captured (stand-in)",
    "later calls name the abort; no event is asked; a new group works",
    "test_device_capture.py::test_capture",
)
def abort_in_a_capture(stage: Stage) -> Outcome:
    return played(stage, aborted_while_captured)
