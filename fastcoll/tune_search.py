"""What ``fastcoll tune`` does with times on any device: takes them, and finds where to change ways."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from fastcoll._measure import Call, Control, Plan, measure, take_turn

__all__ = ["NEVER", "Times", "fastest", "from_where", "limits", "median_times"]

NEVER = 1 << 62

Way = TypeVar("Way", int, str)
Times = Mapping[int, Mapping[Way, float]]
"""Median microseconds by message size and by way: the value of a field, or a name."""


def median_times(
    sizes: Iterable[int],
    calls: Callable[[int], Mapping[Way, Call]],
    control: Control,
    plan: Plan,
    device: torch.device,
) -> dict[int, dict[Way, float]]:
    """Times the ways of each size in turns; all ranks call it.

    Args:
        sizes: Of messages, or other numbers.
        calls: From a size to what does it, by way.
        control: Of all ranks.
        plan: How many calls.
        device: Where they work. On CUDA a time is that of the slowest rank, else the median of the ranks.
    """
    times = {}
    for size in sizes:
        turns = {way: partial(take_turn, call, device) for way, call in calls(size).items()}
        timings = measure(turns, control, plan, slowest_rank=device.type != "cpu")
        times[size] = {way: timing.time.median for way, timing in timings.items()}
    return times


def _cost(times: Iterable[float]) -> float:
    return sum(map(math.log, times))


def limits(times: Times[Way], ways: Sequence[Way]) -> list[int]:
    """Returns up to which size each way but the last is used, so that the product of all times is the least.

    Of several such limits the least; 0 for a way that is used nowhere.

    Args:
        times: A way may be missing.
        ways: From that of the smallest sizes to that of the largest.
    """
    sizes: list[int] = sorted(times)

    def cost(bounds: Sequence[int]) -> float:
        used = (sum(size > bound for bound in bounds) for size in sizes)
        return _cost(
            times[size].get(ways[way], math.inf) for size, way in zip(sizes, used, strict=True)
        )

    choices = itertools.combinations_with_replacement([0, *sizes], len(ways) - 1)
    best: tuple[int, ...] = min(choices, key=cost)
    # A limit that the one before has reached serves nothing.
    return [bound if bound > before else 0 for before, bound in itertools.pairwise((0, *best))]


def from_where(times: Times[Way], ways: Sequence[Way]) -> int:
    """Returns the least size to use the second of two ways for; NEVER if it is best used nowhere."""
    (last,) = limits(times, ways)
    return min((size for size in times if size > last), default=NEVER)


def fastest(times: Times[Way]) -> Way:
    """Returns the way whose product of times over all sizes is the least."""
    ways = next(iter(times.values()))
    return min(ways, key=lambda way: _cost(row[way] for row in times.values()))
