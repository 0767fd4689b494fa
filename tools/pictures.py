"""The pictures of README and docs/, each from records in bench/results, for a light and a dark page.

The caption of a picture has its content, the machine and the date of measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drawings
import one_gpu
from drawings import HOSTS, THEMES, Record, Theme
from svg import carried_digest, digest, save
from table_sources import record_of

from fastcoll.bench.record import medians
from fastcoll.bench.sizes import size_text

__all__ = ["PICTURES", "Picture", "redraw", "stale"]


def _added_shown(records: Sequence[Record]) -> str:
    case = records[0]["cases"][0]
    return f"Gradients of {case['model']} ({case['size'] / 1e6:.0f} MB), 2 ranks, medians."


def _all_reduce_shown(records: Sequence[Record]) -> str:
    times = {case["size"]: medians(case) for case in drawings.all_reduces(records[0])}
    least = min(each["gloo"] / each["fastcoll"] for each in times.values())
    behind = [size for size, each in times.items() if each["mpi"] < each["fastcoll"]]
    ahead = sum(each["mpi"] > each["fastcoll-plan"] for each in times.values())
    return (
        f"fastcoll is at least {int(least * 10) / 10}x faster than Gloo at each size. Intel MPI is faster up to "
        f"{size_text(max(behind))}. A plan is faster than Intel MPI at {ahead} of {len(times)} sizes. float32, 2 "
        "ranks, medians."
    )


def _hosts_shown(records: Sequence[Record]) -> str:
    cases = [case for record in records for case in record["cases"] if case["bytes"]]
    ratios = [round(case["fastcoll"]["ms"] / case["gloo"]["ms"], 2) for case in cases]
    return (
        f"fastcoll is slower in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cases, by "
        f"{max(ratios) - 1:.0%} at most. Emulated hosts, links of {records[0]['megabits'] / 1e3:g} Gbit/s, medians."
    )


def _frameworks_shown(records: Sequence[Record]) -> str:
    cores = records[0]["machine"]["cores_allowed"]
    least = min(one["ratio"] for client in records[0]["cases"] for one in client["ranks"].values())
    return f"Small models on {cores} cores, medians; the least speed-up is {least:.2f}x."


@dataclass(frozen=True)
class Picture:
    """The source of a picture.

    Attributes:
        records: Names in bench/results.
        paint: Draws the records in the colours of a theme.
        caption: Returns a sentence below the picture about the records.
        shows: Alternative text, for readers who do not see the picture.
        width: Pixels on the page.
    """

    records: tuple[str, ...]
    paint: Callable[[Sequence[Record], Theme], Any]
    caption: Callable[[Sequence[Record]], str]
    shows: str
    width: int

    def read(self) -> list[Record]:
        """Returns its records."""
        return [record_of(f"{name}.jsonl") for name in self.records]


PICTURES = {
    "added": Picture(
        ("ddp_cpu_2ranks",),
        drawings.draw_added,
        _added_shown,
        "Bar chart of the time that data parallelism adds to a training step, in ms",
        640,
    ),
    "all_reduce": Picture(
        ("collectives_cpu_2ranks",),
        drawings.draw_all_reduce,
        _all_reduce_shown,
        "Time of all_reduce against the message size, by fastcoll, Gloo and Intel MPI",
        740,
    ),
    "faults": Picture(
        ("faults_cpu",),
        drawings.draw_faults,
        lambda _: "Faults that ran on both.",
        "A dot for each fault, coloured by its outcome, for Gloo and for fastcoll",
        740,
    ),
    "hosts": Picture(
        tuple(f"hosts_{shape}_1000mbit_cpu" for shape in HOSTS),
        drawings.draw_hosts,
        _hosts_shown,
        "Heat map of fastcoll's time over Gloo's, by collective and message size, on four sets of hosts",
        860,
    ),
    "ranks": Picture(
        tuple(f"all_reduce_cpu_{ranks}ranks_16cores" for ranks in (2, 8, 16)),
        drawings.draw_ranks,
        lambda _: "float32, a core for each rank, medians.",
        "Time of Gloo over that of fastcoll against the message size, for 2, 8 and 16 ranks",
        740,
    ),
    "frameworks": Picture(
        ("clients_cpu",),
        drawings.draw_frameworks,
        _frameworks_shown,
        "A dot for each framework: the time of a training step on Gloo over that on fastcoll",
        740,
    ),
    "gpu": Picture(
        one_gpu.RECORDS,
        drawings.draw_gpu,
        lambda _: "One rank sends nothing: these are launches, copies and the host's time.",
        "Bars of four figures of one GPU, PyTorch beside fastcoll",
        740,
    ),
}
"""By name; the files are NAME_light.svg and NAME_dark.svg."""


def redraw(path: Path) -> None:
    """Redraws the picture of that file's name."""
    name, theme = path.stem.rsplit("_", 1)
    records = PICTURES[name].read()
    save(PICTURES[name].paint(records, THEMES[theme]), records, path)


def stale(folder: Path) -> list[str]:
    """Returns the files in a folder that are missing or older than their records."""
    return [
        file
        for name, picture in PICTURES.items()
        for file in (f"{name}_{theme}.svg" for theme in THEMES)
        if carried_digest(folder / file) != digest(picture.read())
    ]
