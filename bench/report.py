"""The printed table of a sweep over sizes, with values computed from the times."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastcoll.bench.collectives import bandwidths

__all__ = ["Table", "closing", "heading"]

# Title, unit, width, and whether it is shown without --wide.
_COLUMNS = (
    ("size", "(B)", 11, True),
    ("count", "(elements)", 11, False),
    ("type", "", 9, True),
    ("redop", "", 6, True),
    ("backend", "", 15, True),
    ("time", "(us)", 9, True),
    ("q1", "(us)", 9, False),
    ("q3", "(us)", 9, False),
    ("min", "(us)", 9, True),
    ("algbw", "(GB/s)", 7, True),
    ("busbw", "(GB/s)", 7, True),
    ("#wrong", "", 6, True),
    ("ratio", "", 7, True),
    ("ratio", "of min", 7, False),
    ("lead", "", 7, True),
    ("lead", "of min", 7, False),
    ("floor", "(us)", 9, True),
    ("/floor", "", 7, False),
    ("others", "(cpu%)", 6, False),
)
_LEGEND = (
    "time: median over calls; ratio: times faster than {baseline} of the size; lead: than the fastest other library; "
    "floor: memory's part"
)


@dataclass
class Table:
    """The table of a sweep.

    Attributes:
        world_size: Number of ranks.
        among: Backends to compare with; the others are shown only.
        libraries: The library of each backend; a lead is over another library.
        baseline: Backend to compute ratios with; None: the slowest of the case.
        wide: Whether to show all columns.
    """

    world_size: int
    among: Collection[str]
    libraries: Mapping[str, str]
    baseline: str | None = None
    wide: bool = False
    _bandwidths: dict[str, list[float]] = field(default_factory=dict, init=False)

    @property
    def legend(self) -> str:
        """The meaning of the columns."""
        return _LEGEND.format(baseline=self.baseline or "the slowest backend")

    def head(self, collective: str) -> list[str]:
        """Returns the two lines of column titles, after the collective's name."""
        titles = self._join([title for title, *_ in _COLUMNS])
        units = self._join([unit for _, unit, *_ in _COLUMNS])
        return [f"# {collective}", f"#{titles[1:]}", f"#{units[1:]}"]

    def rows(self, case: dict[str, Any]) -> list[str]:
        """Returns a line for each backend of a case, and one for each backend that cannot do it."""
        lines = []
        others = case["other_processes_percent"]
        floor = _time(case["floor"]["time"]["median"]) if case["floor"] else "-"
        for name, backend in case["backends"].items():
            time, wrong = backend["time"], backend["wrong"]
            algbw, busbw = bandwidths(
                case["collective"], case["size"], self.world_size, time["median"]
            )
            if case["size"]:
                self._bandwidths.setdefault(name, []).append(busbw)
            ratio, lead, over_floor = self.compare(case, name, "median")
            ratio_of_min, lead_of_min, _ = self.compare(case, name, "minimum")
            cells = [str(case["size"]), str(case["count"]), case["dtype"], case["op"], name]
            cells += [_time(time[key]) for key in ("median", "lower", "upper", "minimum")]
            cells += [f"{algbw:.2f}", f"{busbw:.2f}", "N/A" if wrong is None else str(wrong)]
            cells += map(_ratio, (ratio, ratio_of_min, lead, lead_of_min))
            cells += [floor, _ratio(over_floor)]
            cells += ["-" if others is None else f"{others:.0f}"]
            lines.append(self._join(cells))
        for name, why in case["unsupported"].items():
            lines.append(f"# {case['size']} B: {name} cannot do this: {why}")
        return lines

    def compare(
        self, case: dict[str, Any], name: str, key: str
    ) -> tuple[float | None, float | None, float | None]:
        """Compares a backend with others by the median, or another key of its times.

        Returns:
            The baseline's time over its own; the time of the fastest backend of another library over its own (below
            1: slower); and its own time over that of the floor. None if there is nothing to compare with.
        """
        rows = {each: backend["time"] for each, backend in case["backends"].items()}
        own, library = rows[name][key], self.libraries.get(name, name)
        compared = [each for each in rows if each in self.among] or list(rows)
        baseline = self.baseline or max(compared, key=lambda each: rows[each]["median"])
        others = [rows[each][key] for each in compared if self.libraries.get(each, each) != library]
        return (
            _over(rows[baseline][key] if baseline in rows else None, own),
            _over(min(others, default=None), own),
            _over(own, case["floor"]["time"][key] if case["floor"] else None),
        )

    def averages(self) -> list[str]:
        """Returns the line of average bus bandwidths over the cases shown, as nccl-tests prints it."""
        means = [
            f"{name} {statistics.fmean(values):.2f}" for name, values in self._bandwidths.items()
        ]
        return [f"# average bus bandwidth (GB/s): {', '.join(means)}"] if means else []

    def _join(self, cells: Collection[str]) -> str:
        return " ".join(
            f"{cell:>{width}}"
            for cell, (_, _, width, always) in zip(cells, _COLUMNS, strict=True)
            if always or self.wide
        )


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


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
