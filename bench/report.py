"""The printed table of a sweep over sizes, with values computed from the times; head and verdict of any run."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastcoll._checks import QUIET_PERCENT
from fastcoll.bench.collectives import bandwidths
from fastcoll.bench.derived import floor_of
from fastcoll.bench.record import medians
from fastcoll.bench.sizes import size_text
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
    "time: median over calls; ratio: times faster than {baseline} at the size; lead: speed-up over the "
    "fastest other library; floor: time of the memory alone, from 64 KiB"
)
_MPIS = {"Intel(R) MPI": "Intel MPI", "MPICH": "MPICH", "Open MPI": "Open MPI"}
"""The names of MPIs, by the start of what the library reports."""


@dataclass
class SweepTable:
    """The table of a sweep.

    Attributes:
        world_size: Number of ranks.
        among: Backends to compare with; the others are shown only.
        libraries: The library of each backend; a lead is over another library.
        baseline: Backend to compute ratios with; None: gloo, or in a case without it the slowest.
    """

    world_size: int
    among: Collection[str]
    libraries: Mapping[str, str]
    baseline: str | None = None
    _bandwidths: dict[str, list[float]] = field(default_factory=dict, init=False)
    _cases: list[dict[str, Any]] = field(default_factory=list, init=False)

    @property
    def legend(self) -> str:
        """The meaning of the columns."""
        default = "the slowest backend (gloo is not in this run)"
        if "gloo" in self.among:
            default = "gloo, or where gloo does not run the slowest backend,"
        return _LEGEND.format(baseline=self.baseline or default)

    def head(self, collective: str) -> list[str]:
        """Returns the two lines of column titles, after the collective's name."""
        return [f"# {collective}", *(f"#{line[1:]}" for line in _TABLE.head())]

    def rows(self, case: dict[str, Any]) -> list[str]:
        """Returns a line for each backend of a case, and one for each backend that cannot do it."""
        lines = []
        self._cases.append(case)
        floor = floor_of(case)
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
                floor and _time(floor["median"]),
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
        slowest = max(compared, key=lambda each: rows[each])
        baseline = self.baseline or ("gloo" if "gloo" in compared else slowest)
        others = [rows[each] for each in compared if self.libraries.get(each, each) != library]
        return _over(rows.get(baseline), own), _over(min(others, default=None), own)

    def averages(self) -> list[str]:
        """Returns the line of average bus bandwidths over the cases shown, as nccl-tests prints it."""
        means = [
            f"{name} {statistics.fmean(values):.2f}" for name, values in self._bandwidths.items()
        ]
        return [f"# average bus bandwidth (GB/s): {', '.join(means)}"] if means else []

    def answers(self) -> list[str]:
        """Returns for each collective, and each way to call fastcoll, a sentence on where it is faster or behind."""
        kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for case in self._cases:
            kinds.setdefault((case["collective"], case["dtype"], case["op"]), []).append(case)
        ours = [name for name in self.among if name.partition("-")[0] == "fastcoll"]
        others = [name for name in self.among if name not in ours]
        lines = []
        for kind, cases in kinds.items():
            alone = sum(each[0] == kind[0] for each in kinds) == 1
            title = kind[0] if alone else " ".join(word for word in kind if word != "none")
            for name in ours:
                clauses = [text for other in others for text in self._clauses(cases, name, other)]
                if clauses:
                    lines.append(f"# {title}: {name} is {'; '.join(clauses)}")
        busy = max((case.get("other_processes_percent") or 0 for case in self._cases), default=0)
        if lines and busy > QUIET_PERCENT:
            lines.append(
                f"# other processes used up to {busy:.0f}% of the machine: run it when it is idle, or add --quiet 5"
            )
        return lines

    def _clauses(self, cases: list[dict[str, Any]], ours: str, other: str) -> list[str]:
        """Returns where a backend is faster than another, and where it is behind; of gloo always both."""
        times = {case["size"]: medians(case) for case in cases}
        ratios = {
            size: row[other] / row[ours]
            for size, row in sorted(times.items())
            if ours in row and other in row
        }
        faster = sum(ratio > 1 for ratio in ratios.values())
        behind = [size for size, ratio in ratios.items() if ratio < 1]
        sizes, library = list(ratios), self.libraries.get(other, "")
        name = next((mpi for start, mpi in _MPIS.items() if library.startswith(start)), other)
        texts = []
        if faster and (not behind or other == "gloo" or "gloo" not in self.among):
            at = f" at {faster} of {len(sizes)} sizes" if len(sizes) > 1 else ""
            span = dict.fromkeys(times_text(end(ratios.values())) for end in (min, max))
            texts.append(f"faster than {name}{at}, {' to '.join(span)}")
        return [*texts, *([f"behind {name}{_where(behind, sizes)}"] if behind else [])]


def _where(some: list[int], sizes: list[int]) -> str:
    """Returns which sizes some of them are: " below 64 KiB"; "" if there is one size."""
    if some == sizes:
        return " at each size" if len(sizes) > 1 else ""
    if some == sizes[: len(some)]:
        return f" below {size_text(sizes[len(some)])}"
    if some == sizes[-len(some) :]:
        return f" from {size_text(some[0])}"
    return f" at {len(some)} of {len(sizes)} sizes"


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
    memory, cold = (machine["memory_bytes"] or 0) / 2**30, record["cold_bytes"]
    each = " a rank" if record["cores_each"] else ""
    hosts = f" on {record['hosts']} hosts" if record["hosts"] > 1 else ""
    lines = [
        record["command"],
        f"{record['date']}  {machine['cpu']}, {machine['cores_allowed']} cores{each}, {memory:.0f} GiB, "
        f"Linux {machine['kernel']}, load {machine['load_average'][0]:.2f}",
        f"fastcoll {versions['fastcoll']}, torch {versions['torch']}; {record['world_size']} ranks{hosts}, "
        f"{record['device']}; at least {record['iterations']} timed calls each, in {record['rounds']} rounds",
        legend,
        *([f"cold: calls take buffers of {cold >> 20} MiB in turn"] if cold else []),
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
