"""A turn: one candidate's timed calls.

All ranks meet, asleep until the last has come; compute for some milliseconds, as training would, in which the
scheduler gives each a core again (it wakes them on one: calls of 5 us then took 70); make some untimed calls that
take up the skew of the meeting; and then the timed ones back to back, each timed on each rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SETTLE_SECONDS", "Call", "TimedCall", "synchronize", "take_turn"]

Call = Callable[[], object]

SETTLE_SECONDS = 0.005


def synchronize(device: torch.device) -> None:
    """Waits for work on a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _time_on_cpu(call: Call, calls: int) -> list[float]:
    clock = time.perf_counter_ns
    stamps = [clock()] * (calls + 1)
    for index in range(1, calls + 1):
        call()
        stamps[index] = clock()
    return [(stamps[index + 1] - stamps[index]) / 1e3 for index in range(calls)]


def _time_on_cuda(call: Call, calls: int) -> list[float]:
    """Times on the stream: a call ends when work that is submitted after it may begin."""
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(calls + 1)
    ]
    torch.cuda.synchronize()
    marks[0].record()
    for index in range(calls):
        call()
        marks[index + 1].record()
    torch.cuda.synchronize()
    return [marks[index].elapsed_time(marks[index + 1]) * 1e3 for index in range(calls)]


def _settle() -> None:
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        pass


def take_turn(call: Call, device: torch.device, meet: Call, warmup: int, calls: int) -> list[float]:
    """Times calls in this process.

    Args:
        call: What is timed.
        device: "cuda" measures with events on the current stream, "cpu" with the clock.
        meet: Returns when all ranks are here.
        warmup: Untimed calls.
        calls: Timed calls.

    Returns:
        The microseconds of each timed call.
    """
    timed = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    collecting = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        meet()
        _settle()
        for _ in range(warmup):
            call()
        return timed(call, calls)
    finally:
        if collecting:
            gc.enable()


class TimedCall:
    """A call of this process.

    Args:
        call: Without arguments.
        device: Where it works.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call = call
        self._device = device

    def turn(self, meet: Call, warmup: int, calls: int) -> list[float]:
        """Takes a turn."""
        return take_turn(self.call, self._device, meet, warmup, calls)
