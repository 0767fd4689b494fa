"""Draws a sweep over sizes, for ``--plot``."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from fastcoll.bench.collectives import bandwidths
from fastcoll.bench.derived import floor_of

__all__ = ["draw", "missing"]

_FLOOR = "memory floor"


def missing() -> str:
    """Returns the text about what to install for drawing, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def _kind(case: dict[str, Any]) -> tuple[str, str, str]:
    return case["collective"], case["dtype"], case["op"]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: a row for each collective, dtype and op; bands are the quartiles.

    Args:
        record: Record of a run over sizes.
        path: The file; its suffix selects the format.
    """
    cases = [case for case in record["cases"] if case["size"] and case["backends"]]
    kinds, ranks = list(dict.fromkeys(map(_kind, cases))), record["world_size"]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 4.2 * max(1, len(kinds))), layout="constrained"
    )
    axes = figure.subplots(max(1, len(kinds)), 2, squeeze=False)
    for (latency, bandwidth), kind in zip(axes, kinds, strict=False):
        for name in (*record["backends"], _FLOOR):
            rows = [
                (case["size"], time)
                for case in cases
                if _kind(case) == kind
                and (
                    time := floor_of(case)
                    if name == _FLOOR
                    else case["backends"].get(name, {}).get("time")
                )
            ]
            if not rows:
                continue
            sizes, times = zip(*rows, strict=True)
            median, lower, upper = (
                [time[key] for time in times] for key in ("median", "lower", "upper")
            )
            style = {"label": name, "marker": "o", "markersize": 3}
            if name == _FLOOR:
                style = {"label": name, "color": "black", "linestyle": "--"}
            (line,) = latency.plot(sizes, median, **style)
            if name != _FLOOR:
                latency.fill_between(
                    sizes, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0
                )
            bus = [
                bandwidths(kind[0], size, ranks, time)[1]
                for size, time in zip(sizes, median, strict=True)
            ]
            bandwidth.plot(sizes, bus, **style)
        title = " ".join(word for word in kind if word != "none")
        for axis, what in ((latency, "time per call (us)"), (bandwidth, "bus bandwidth (GB/s)")):
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=what)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{title}, {ranks} ranks")
            axis.grid(True, which="major", alpha=0.3)
            axis.legend()
    machine = record["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores_allowed']} cores; {record['date']}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
