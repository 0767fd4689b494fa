"""The work of a training step besides its collectives, by torch.profiler: ``fastcoll.bench ddp --profile``.

On a GPU a *launch* is a kernel, a copy or a fill that the device ran. On the CPU it is an operator of torch that calls
no other. Collectives are identified by their names. The host's time is measured without the profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fastcoll._measure import Call, synchronize
from fastcoll.bench.derived import StepProfile

__all__ = ["profile_step", "profiled"]

STEPS = 5

_COLLECTIVES = (
    "nccl",
    "onerankreduce",  # NCCL's at one rank
    "staged_kernel",  # one_shot and two_shot
    "ring_kernel",
    "bucket_kernel",  # copies results out too
)
"""Parts of the names of kernels that move messages between ranks, in lower case."""


def _kind(event: Any, on_gpu: bool) -> str:
    """Returns "launch", "collective" or "call", or "" for any other event."""
    name = event.name.lower()
    if event.device_type.name == "CUDA":
        if getattr(event, "is_user_annotation", False):
            return ""
        return "collective" if any(part in name for part in _COLLECTIVES) else "launch"
    if on_gpu:  # calls of the driver
        called = any(part in name for part in ("launch", "memcpy", "memset"))
        return "call" if name.startswith("cu") and called else ""
    if event.is_async:  # a work, named after its backend: "gloo:all_reduce"
        return "collective" if ":" in name else ""
    return "launch" if name.startswith("aten::") and not event.cpu_children else ""


def profiled(events: Iterable[Any], steps: int, on_gpu: bool, host: float) -> StepProfile:
    """Returns the profile of one step, from the profiler's events of several steps.

    Raises:
        ValueError: Nothing was launched.
    """
    times: dict[str, list[float]] = {"launch": [], "collective": [], "call": [], "": []}
    for event in events:
        times[_kind(event, on_gpu)].append(event.time_range.elapsed_us())
    launches, collectives = times["launch"], times["collective"]
    if not launches + collectives:
        raise ValueError("expected launches among the profiler's events, got none")
    totals = [len(launches), sum(launches), len(collectives), sum(collectives), len(times["call"])]
    return StepProfile(host, *(total / steps for total in totals))


def profile_step(step: Callable[[], object], device: torch.device, meet: Call) -> StepProfile:
    """Takes steps without the profiler, and then with it; all ranks call this.

    Args:
        step: Takes a step.
        device: Device of the step.
        meet: Barrier of all ranks.
    """
    on_gpu = device.type == "cuda"
    times = []
    for _ in range(STEPS):
        synchronize(device)
        meet()
        begin = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # One step warms up, because the first traced step lacks kernels.
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=activities, schedule=plan) as found:
        for _ in range(1 + STEPS):
            step()
            synchronize(device)
            found.step()
    return profiled(found.events() or (), STEPS, on_gpu, statistics.median(times))
