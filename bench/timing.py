"""Times several calls side by side, in rounds so short that the machine's noise meets all of them alike.

In each round the candidates come one after another, each time with another one first. A candidate's turn:
all ranks meet through the store, where they sleep; compute for some milliseconds, as training would, in which
the scheduler gives each a core again (it wakes them on one: calls of 5 us then took 70); make some untimed
calls that take up the skew of the meeting; and then the timed ones back to back, each timed on each rank.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastcoll.bench.control import Control

__all__ = ["SETTLE_SECONDS", "Call", "Plan", "Summary", "Timing", "measure", "summarise"]

Call = Callable[[], object]

SETTLE_SECONDS = 0.005
_MOST_TIMES = 100  # the calls asked for, when a turn is filled up


@dataclass(frozen=True)
class Plan:
    """How many calls are made.

    Attributes:
        iterations: Timed calls of each candidate, at least; rounded up to a multiple of the rounds.
        rounds: Turns of each candidate.
        warmup: Untimed calls at the start of each turn.
        turn_milliseconds: A fast candidate makes more calls in a turn, to fill this time.
    """

    iterations: int
    rounds: int
    warmup: int
    turn_milliseconds: float = 0.0

    @property
    def calls(self) -> int:
        """Timed calls of a turn, at least."""
        return -(-self.iterations // self.turns)

    def calls_of(self, microseconds: float) -> int:
        """Returns the timed calls of a turn for a candidate whose calls take that long."""
        fitting = int(self.turn_milliseconds * 1e3 / max(microseconds, 0.1))
        return max(self.calls, min(fitting, _MOST_TIMES * self.calls))

    @property
    def turns(self) -> int:
        """Rounds, at most one for each call."""
        return min(self.rounds, self.iterations)


@dataclass(frozen=True)
class Summary:
    """Order statistics of times in microseconds; `lower` and `upper` are the quartiles."""

    count: int
    minimum: float
    lower: float
    median: float
    upper: float
    maximum: float
    mean: float


@dataclass(frozen=True)
class Timing:
    """The times of one candidate.

    Attributes:
        calls: Of calls, each of them one number for all ranks.
        rank_medians: Median of each rank's own times, in microseconds.
    """

    calls: Summary
    rank_medians: list[float]


def summarise(samples: Sequence[float]) -> Summary:
    """Summarises at least one sample; quartiles are interpolated between the two nearest samples."""
    if len(samples) == 1:
        lower = median = upper = samples[0]
    else:
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(
        len(samples), min(samples), lower, median, upper, max(samples), statistics.fmean(samples)
    )


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


def measure(
    candidates: Mapping[str, Call],
    control: Control,
    plan: Plan,
    device: torch.device,
    slowest_rank: bool,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times all candidates; all ranks call this with the same names in the same order.

    Args:
        candidates: Calls by name.
        control: Of all ranks.
        plan: How many calls.
        device: "cuda" measures with events on the current stream, "cpu" with the clock.
        slowest_rank: The time of a call is that of the slowest rank, as is right where one rank may be
            done long before the others; else the median of the ranks.
        advance: Called after each turn.

    Returns:
        The same on all ranks.
    """
    timed = _time_on_cuda if device.type == "cuda" else _time_on_cpu

    def take_turn(call: Call, calls: int) -> list[float]:
        collecting = gc.isenabled()
        gc.collect(0)
        gc.disable()
        try:
            control.barrier()
            _settle()
            for _ in range(plan.warmup):
                call()
            return timed(call, calls)
        finally:
            if collecting:
                gc.enable()

    estimates = control.all_gather(
        {name: min(take_turn(candidates[name], 3)) for name in candidates}
    )
    calls = {name: plan.calls_of(max(rank[name] for rank in estimates)) for name in candidates}
    own: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(plan.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            own[name] += take_turn(candidates[name], calls[name])
            advance()
    ranks = control.all_gather(own)
    across: Callable[[Sequence[float]], float] = max if slowest_rank else statistics.median
    return {
        name: Timing(
            summarise(
                [across(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
            ),
            [statistics.median(rank[name]) for rank in ranks],
        )
        for name in names
    }
