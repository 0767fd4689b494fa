"""Draws latency and bandwidth against size from what ``--json`` records."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["draw", "missing", "new_figure"]


def missing() -> str:
    """Returns what to install before :func:`draw` can work, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib's, of so many inches, that needs no display."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _kind(case: dict[str, Any]) -> tuple[str, str, str]:
    return case["collective"], case["dtype"], case["op"]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: a row for each collective, dtype and op; bands are the quartiles.

    Args:
        record: Of a run over sizes.
        path: The file; its suffix selects the format.
    """
    cases = [case for case in record["cases"] if case["size"] and case["backends"]]
    kinds = list(dict.fromkeys(map(_kind, cases)))
    figure = new_figure(11, 4.2 * max(1, len(kinds)))
    axes = figure.subplots(max(1, len(kinds)), 2, squeeze=False)
    for (latency, bandwidth), kind in zip(axes, kinds, strict=False):
        of_kind = [case for case in cases if _kind(case) == kind]
        for name in record["backends"]:
            here = [case for case in of_kind if name in case["backends"]]
            rows = [case["backends"][name] for case in here]
            if not rows:
                continue
            sizes = [case["size"] for case in here]
            times = [row["time"] for row in rows]
            (line,) = latency.plot(
                sizes, [time["median"] for time in times], marker="o", markersize=3, label=name
            )
            latency.fill_between(
                sizes,
                [time["lower"] for time in times],
                [time["upper"] for time in times],
                color=line.get_color(),
                alpha=0.2,
                linewidth=0,
            )
            bandwidth.plot(
                sizes, [row["busbw"] for row in rows], marker="o", markersize=3, label=name
            )
        floored = [case for case in of_kind if case["floor"]]
        if floored:
            sizes = [case["size"] for case in floored]
            for axis, values in (
                (latency, [case["floor"]["time"]["median"] for case in floored]),
                (bandwidth, [case["floor"]["busbw"] for case in floored]),
            ):
                axis.plot(sizes, values, color="black", linestyle="--", label="memory floor")
        title = " ".join(word for word in kind if word != "none")
        for axis, what in ((latency, "time per call (us)"), (bandwidth, "bus bandwidth (GB/s)")):
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=what)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{title}, {record['world_size']} ranks")
            axis.grid(True, which="major", alpha=0.3)
            axis.legend()
    machine = record["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores_allowed']} cores; {record['date']}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
