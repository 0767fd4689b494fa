"""What is computed from the values of a record: added time, the least bytes to send, and the floor. Needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    *("BAR", "ENGINE_COLUMNS", "Added", "StepProfile"),
    *("added", "added_by_profile", "copy_bandwidth", "floor_of", "least_bytes"),
]

BAR = "bucket copy"
"""The candidate that flatten is compared with: a copy of each bucket, in one launch each."""

ENGINE_COLUMNS = ("fastcoll", "nccl", "NCCL alone", "nccl, no recorder")
"""What the engine's benchmark times; records from before 2026-11-30 have the first two."""

_FLOOR_FROM = 64 << 10  # bytes; below, most of its time is that of torch's call


class Added(NamedTuple):
    """The time that a backend adds to a step.

    Attributes:
        by_median: Median minus that of the step without DDP, in microseconds.
        by_minimum: The same with minima.
        ratio: The greatest time that a backend adds with the same buckets over this one, by medians; None if
            this backend adds nothing.
    """

    by_median: float
    by_minimum: float
    ratio: float | None


def added(row: dict[str, Any]) -> list[tuple[dict[str, Any], Added]]:
    """Returns each case of a model, with the time that it adds."""

    def more(case: dict[str, Any], key: str) -> float:
        return float(case["time"][key] - row["alone"]["time"][key])

    found = []
    for case in row["cases"]:
        own = more(case, "median")
        alike = [each for each in row["cases"] if each["buckets"] == case["buckets"]]
        ratio = max(more(each, "median") for each in alike) / own if own > 0 else None
        found.append((case, Added(own, more(case, "minimum"), ratio)))
    return found


class StepProfile(NamedTuple):
    """One step, on this rank.

    Attributes:
        host_microseconds: Time until the step has queued all work on an idle device: the median of some steps.
        launches: Number of launches, without those of collectives.
        launch_microseconds: The sum of their times.
        collectives: Number of kernels of collectives; on the CPU, of calls.
        collective_microseconds: The sum of their times.
        calls: Number of the host's calls that put work on the device: launches of kernels and graphs, copies and fills.
    """

    host_microseconds: float
    launches: float
    launch_microseconds: float
    collectives: float
    collective_microseconds: float
    calls: float


def added_by_profile(row: dict[str, Any], case: dict[str, Any]) -> StepProfile | None:
    """Returns a case's profile minus that of the step without DDP; None if it was not profiled."""
    if "profile" not in case:
        return None
    alone = row["alone"]["profile"]
    return StepProfile(**{name: value - alone[name] for name, value in case["profile"].items()})


def least_bytes(call: str, message: int, hosts: int) -> float | None:
    """Returns the least bytes that the busiest host must send; None if they depend on the root.

    Args:
        call: The collective. "send" is from the first rank to the last and back, "exchange" between these two, both
            ways at once.
        message: Its bytes; of reduce_scatter, all_gather and all_to_all the whole buffer.
        hosts: Number of hosts.
    """
    share = (hosts - 1) / hosts
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "exchange": 1.0}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather"), share)
    return factors[call] * message if call in factors else None


def floor_of(case: dict[str, Any]) -> dict[str, float] | None:
    """Returns the times of a case's floor; None if it has none, or is too small for one."""
    found: dict[str, float] | None = None
    if case["floor"] and case["size"] >= _FLOOR_FROM:
        found = case["floor"]["time"]
    return found


def copy_bandwidth(row: dict[str, Any], candidate: str) -> float | None:
    """Returns the GB/s of a copy that is a candidate of a kernels' case, or None: as calls, if a graph is slower."""
    if candidate not in row["candidates"]:
        return None
    times = row["candidates"][candidate]
    shorter = min(float(times[way]["median"]) for way in ("graph", "eager"))
    return float(row["bytes"]) / shorter / 1e3
