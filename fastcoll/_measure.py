"""Times several calls side by side, in rounds so short that the machine's noise affects all of them alike.

In each round every candidate has one turn, and each round begins with another candidate. A turn has four steps:

1. All ranks meet; each sleeps until the last one arrives.
2. Each rank computes for some milliseconds, as training would. In this time the scheduler gives each rank a core of its
   own. It wakes all ranks on one core, and calls of 5 us then took 70 us.
3. Untimed calls absorb the skew of the meeting.
4. Timed calls follow back to back, each timed on each rank.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store

__all__ = [
    *("SETTLE_SECONDS", "Call", "Control", "Plan", "Summary", "Timing", "Turn"),
    *("in_turns", "measure", "summarise", "synchronize", "take_turn"),
]

SETTLE_SECONDS = 0.005
_MOST_TIMES = 100  # most calls to fill a turn, in multiples of the calls asked for

Call = Callable[[], object]
Turn = Callable[[Call, int, int], list[float]]
"""(barrier of all ranks, untimed calls, timed calls) -> microseconds of each timed call."""

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


@dataclass(eq=False)
class Control:
    """Barrier and all-gather of a run's ranks, through the store and so apart from everything that is measured.

    Attributes:
        store: A store of all ranks, used for nothing else.
        rank: Rank of this process.
        world_size: Number of ranks.
    """

    store: Store
    rank: int
    world_size: int
    _sequence: int = field(default=0, init=False)

    def barrier(self) -> None:
        """Sleeps until all ranks have arrived; they leave within some tens of microseconds."""
        key = self._next("barrier")
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}/open", "1")
        self.store.wait([f"{key}/open"])

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order; JSON must have their types."""
        key = self._next("value")
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _next(self, kind: str) -> str:
        self._sequence += 1
        return f"{kind}/{self._sequence}"


@dataclass(frozen=True)
class Plan:
    """Number of calls.

    Attributes:
        iterations: Least number of timed calls of each candidate; rounded up to a multiple of the rounds.
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
        """Least number of timed calls in a turn."""
        return -(-self.iterations // self.turns)

    def calls_of(self, microseconds: float) -> int:
        """Returns the number of timed calls in a turn, for a candidate whose calls take that long."""
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
        time: Times of the calls; each call has one time for all ranks.
        rank_medians: Median of each rank's own times, in microseconds.
    """

    time: Summary
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


def in_turns(
    turns: Mapping[Name, Callable[[], list[Sample]]], rounds: int, advance: Call = lambda: None
) -> dict[Name, list[Sample]]:
    """Takes all turns once a round, each round beginning with another name; returns the samples of each name."""
    names = list(turns)
    samples: dict[Name, list[Sample]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            samples[name] += turns[name]()
            advance()
    return samples


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


def take_turn(
    call: Call,
    device: torch.device,
    meet: Call,
    warmup: int,
    calls: int,
    *,
    refresh: Call = lambda: None,
    lifetime: int | None = None,
) -> list[float]:
    """Times calls in this process; with the first two arguments bound it is a ``Turn``.

    Args:
        call: The call to time.
        device: "cuda" measures with events on the current stream, "cpu" with the clock.
        meet: Barrier of all ranks.
        warmup: Untimed calls.
        calls: Timed calls.
        refresh: Writes the data, before the calls and whenever they have been used up.
        lifetime: Most calls, at least 2, on the same data; after these, an untimed call absorbs the skew of the
            refreshing. None: any number.

    Returns:
        The microseconds of each timed call.
    """
    most = lifetime or warmup + calls
    timed = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    collecting = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        refresh()
        meet()
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end:
            pass
        times: list[float] = []
        untimed = min(warmup, most - 1)
        while len(times) < calls:
            if times:
                refresh()
                untimed = max(untimed, 1)
            for _ in range(untimed):
                call()
            times += timed(call, min(most - untimed, calls - len(times)))
        return times
    finally:
        if collecting:
            gc.enable()


def measure(
    candidates: Mapping[Name, Turn],
    control: Control,
    plan: Plan,
    slowest_rank: bool,
    advance: Call = lambda: None,
) -> dict[Name, Timing]:
    """Times all candidates. All ranks must call this, with equally many candidates in the same order.

    Args:
        candidates: Turns by name.
        control: Control of the run.
        plan: Number of calls.
        slowest_rank: True: the time of a call is that of the slowest rank, which is right if one rank may
            return long before the others. False: it is the median of the ranks.
        advance: Called after each turn.

    Returns:
        Times by name, the same on all ranks.
    """

    def take(name: Name, calls: int) -> list[float]:
        return candidates[name](control.barrier, plan.warmup, calls)

    names = list(candidates)
    estimates = zip(*control.all_gather([min(take(name, 3)) for name in names]), strict=True)
    calls = {name: plan.calls_of(max(ranks)) for name, ranks in zip(names, estimates, strict=True)}
    turns = {name: partial(take, name, calls[name]) for name in names}
    own = in_turns(turns, plan.turns, advance)
    everybody = zip(*control.all_gather(list(own.values())), strict=True)
    across: Callable[[Sequence[float]], float] = max if slowest_rank else statistics.median
    return {
        name: Timing(
            summarise([across(times) for times in zip(*ranks, strict=True)]),
            [statistics.median(times) for times in ranks],
        )
        for name, ranks in zip(names, everybody, strict=True)
    }
