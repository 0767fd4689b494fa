"""Times several calls side by side, in rounds so short that the machine's noise meets all of them alike.

In each round the candidates take their turns (see turn.py) one after another, each time with another one first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastcoll.bench.control import Control
from fastcoll.bench.turn import TimedCall

__all__ = ["Plan", "Summary", "Timing", "measure", "summarise"]

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


def measure(
    candidates: Mapping[str, TimedCall],
    control: Control,
    plan: Plan,
    slowest_rank: bool,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times all candidates; all ranks call this with the same names in the same order.

    Args:
        candidates: By name.
        control: Of all ranks.
        plan: How many calls.
        slowest_rank: The time of a call is that of the slowest rank, as is right where one rank may be
            done long before the others; else the median of the ranks.
        advance: Called after each turn.

    Returns:
        Times by name, the same on all ranks.
    """

    def take(name: str, calls: int) -> list[float]:
        return candidates[name].turn(control.barrier, plan.warmup, calls)

    names = list(candidates)
    estimates = control.all_gather({name: min(take(name, 3)) for name in names})
    calls = {name: plan.calls_of(max(rank[name] for rank in estimates)) for name in names}
    own: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(plan.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            own[name] += take(name, calls[name])
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
