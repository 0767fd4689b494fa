"""The printed table of a sweep over sizes, with values computed from the times; head and verdict of any run."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastcoll.bench.collectives import bandwidths
from fastcoll.bench.record import medians
from fastcoll.bench.table import Column, Table, times_text

__all__ = ["SweepTable", "closing", "heading"]

_TABLE = Table(
    Column("size", 11, unit="(B)"),
    Column("type", 9),
    Column("redop", 6),
    Column("backend", 15),
    Column("time", 9, unit="(us)"),
    Column("min", 9, unit="(us)"),
    Column("algbw", 7, unit="(GB/s)"),
    Column("busbw", 7, unit="(GB/s)"),
    Column("#wrong", 6),
    Column("ratio", 7),
    Column("lead", 7),
    Column("floor", 9, unit="(us)"),
)
_LEGEND = (
    "time: median over calls; ratio: times faster than {baseline} of the size; lead: than the fastest other library; "
    "floor: memory's part"
)


@dataclass
class SweepTable:
    """The table of a sweep.

    Attributes:
        world_size: Number of ranks.
        among: Backends to compare with; the others are shown only.
        libraries: The library of each backend; a lead is over another library.
        baseline: Backend to compute ratios with; None: the slowest of the case.
    """

    world_size: int
    among: Collection[str]
    libraries: Mapping[str, str]
    baseline: str | None = None
    _bandwidths: dict[str, list[float]] = field(default_factory=dict, init=False)

    @property
    def legend(self) -> str:
        """The meaning of the columns."""
        return _LEGEND.format(baseline=self.baseline or "the slowest backend")

    def head(self, collective: str) -> list[str]:
        """Returns the two lines of column titles, after the collective's name."""
        return [f"# {collective}", *(f"#{line[1:]}" for line in _TABLE.head())]

    def rows(self, case: dict[str, Any]) -> list[str]:
        """Returns a line for each backend of a case, and one for each backend that cannot do it."""
        lines = []
        floor = _time(case["floor"]["time"]["median"]) if case["floor"] else None
        for name, backend in case["backends"].items():
            time, wrong = backend["time"], backend["wrong"]
            bandwidth = bandwidths(
                case["collective"], case["size"], self.world_size, time["median"]
            )
            if case["size"]:
                self._bandwidths.setdefault(name, []).append(bandwidth[1])
            cells = [
                *(case["size"], case["dtype"], case["op"], name),
                *(_time(time[key]) for key in ("median", "minimum")),
                *bandwidth,
                "N/A" if wrong is None else wrong,
                *map(times_text, self.compare(case, name)),
                floor,
            ]
            lines.append(_TABLE.row(cells))
        for name, why in case["unsupported"].items():
            lines.append(f"# {case['size']} B: {name} cannot do this: {why}")
        return lines

    def compare(self, case: dict[str, Any], name: str) -> tuple[float | None, float | None]:
        """Compares a backend with others by the median.

        Returns:
            The baseline's time over its own; and the time of the fastest backend of another library over its own
            (below 1: slower). None if there is nothing to compare with.
        """
        rows = medians(case)
        own, library = rows[name], self.libraries.get(name, name)
        compared = [each for each in rows if each in self.among] or list(rows)
        baseline = self.baseline or max(compared, key=lambda each: rows[each])
        others = [rows[each] for each in compared if self.libraries.get(each, each) != library]
        return _over(rows.get(baseline), own), _over(min(others, default=None), own)

    def averages(self) -> list[str]:
        """Returns the line of average bus bandwidths over the cases shown, as nccl-tests prints it."""
        means = [
            f"{name} {statistics.fmean(values):.2f}" for name, values in self._bandwidths.items()
        ]
        return [f"# average bus bandwidth (GB/s): {', '.join(means)}"] if means else []


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.1f}"


def heading(record: dict[str, Any], legend: str) -> list[str]:
    """Returns the lines above all tables; none on ranks without a record.

    Args:
        record: Record of the run.
        legend: The meaning of the columns.
    """
    if "machine" not in record:
        return []
    machine, versions = record["machine"], record["versions"]
    memory = (machine["memory_bytes"] or 0) / 2**30
    hosts = f" on {record['hosts']} hosts" if record["hosts"] > 1 else ""
    lines = [
        record["command"],
        f"{record['date']}  {machine['cpu']}, {machine['cores_allowed']} cores, {memory:.0f} GiB, "
        f"Linux {machine['kernel']}, load {machine['load_average'][0]:.2f}",
        f"fastcoll {versions['fastcoll']}, torch {versions['torch']}; {record['world_size']} ranks{hosts}, "
        f"{record['device']}; at least {record['iterations']} timed calls each, in {record['rounds']} rounds",
        legend,
        *(f"{name}: {library}" for name, library in record["libraries"].items() if library),
        *(f"{name} is left out: {why}" for name, why in record["left_out"].items()),
    ]
    return [f"# {line}" for line in lines]


def closing(wrong: int, checked: bool, measured: int) -> list[str]:
    """Returns the verdict below all tables."""
    if not measured:
        return ["# nothing was measured: no backend is left"]
    if not checked:
        return ["# results were not verified"]
    return [f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}"]
