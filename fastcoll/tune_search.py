"""The parts of ``fastcoll tune`` for any device: measuring times, and finding the sizes at which to change ways."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from fastcoll._measure import Call, Control, Plan, measure, take_turn

__all__ = ["NEVER", "Times", "fastest", "from_where", "limits", "median_times", "show"]

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
        sizes: Message sizes, or other numbers.
        calls: Returns the calls for a size, by way.
        control: Control of the run.
        plan: Number of calls.
        device: Device of the calls. On CUDA a time is that of the slowest rank, else the median of the ranks.
    """
    times = {}
    for size in sizes:
        turns = {way: partial(take_turn, call, device) for way, call in calls(size).items()}
        timings = measure(turns, control, plan, slowest_rank=device.type != "cpu")
        times[size] = {way: timing.time.median for way, timing in timings.items()}
    return times


def show(control: Control, field: str, value: int, remark: str = "") -> None:
    """Prints the value that was found for a field, on the first rank."""
    if control.rank == 0:
        print(f"{field:20} {value:>20}{remark}", flush=True)


def _cost(times: Iterable[float]) -> float:
    return sum(map(math.log, times))


def limits(times: Times[Way], ways: Sequence[Way]) -> list[int]:
    """Returns the largest size of each way but the last, for the least product of all times.

    If several limits are equally good, these are the least. The limit of a way that is used nowhere is 0.

    Args:
        times: Times by size and way; a way may be missing.
        ways: Ways in the order of their sizes, that of the smallest first.
    """
    sizes: list[int] = sorted(times)

    def cost(bounds: Sequence[int]) -> float:
        used = (sum(size > bound for bound in bounds) for size in sizes)
        return _cost(
            times[size].get(ways[way], math.inf) for size, way in zip(sizes, used, strict=True)
        )

    choices = itertools.combinations_with_replacement([0, *sizes], len(ways) - 1)
    best: tuple[int, ...] = min(choices, key=cost)
    # A limit that is not above the one before selects nothing.
    return [bound if bound > before else 0 for before, bound in itertools.pairwise((0, *best))]


def from_where(times: Times[Way], ways: Sequence[Way]) -> int:
    """Returns the least size for which to use the second of two ways; NEVER if there is none."""
    (last,) = limits(times, ways)
    return min((size for size in times if size > last), default=NEVER)


def fastest(times: Times[Way]) -> Way:
    """Returns the way with the least product of times over all sizes."""
    ways = next(iter(times.values()))
    return min(ways, key=lambda way: _cost(row[way] for row in times.values()))
