"""Says how much a measurement was disturbed by other processes, and on request measures again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from fastcoll._measure import Call, Timing, Turn, measure
from fastcoll.bench.options import MOST_ATTEMPTS
from fastcoll.bench.run import Run

__all__ = ["OtherProcesses", "measure_in_quiet"]


class OtherProcesses:
    """Measures, from its creation on, how much of this machine is used by processes that are not ours.

    Args:
        run: This rank; all create and ask it together.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start = self._now()

    def percent(self) -> float | None:
        """Returns their share of all cores' time, steps of the kernel's clock apart; None on many hosts."""
        used = self._run.control.all_gather(
            [b - a for a, b in zip(self._start, self._now(), strict=True)]
        )
        if int(os.environ.get("LOCAL_WORLD_SIZE", self._run.world_size)) < len(used):
            return None
        _, busy, total = used[0]
        ours = sum(rank[0] for rank in used)
        return max(0.0, 100 * (busy - ours) / total) if total > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Returns the seconds that this rank has used, and of all cores those in use and all."""
        own = time.process_time()
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        return own, (sum(ticks) - idle) / second, sum(ticks) / second


def measure_in_quiet(
    run: Run, candidates: Mapping[str, Turn], slowest_rank: bool, advance: Call
) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Measures, again while others disturb if ``--quiet`` was given; the times have no say in it.

    Args:
        run: This rank.
        candidates: By name.
        slowest_rank: As for :func:`fastcoll._measure.measure`.
        advance: Called after each turn.

    Returns:
        The times of the last measurement, and for the record how it was disturbed, and how many there were.
    """
    quiet, attempt = run.options.quiet, 0
    while True:
        attempt += 1
        others = OtherProcesses(run)
        timings = measure(candidates, run.control, run.plan, slowest_rank, advance)
        percent = others.percent()
        quiet_enough = quiet is None or percent is None or percent <= quiet
        if quiet_enough or attempt == MOST_ATTEMPTS:
            return timings, {"other_processes_percent": percent, "attempts": attempt}
        time.sleep(1)
