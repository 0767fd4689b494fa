"""Draws times over message sizes: for ``--plot``, and for the pictures of the pages (tools/drawings.py)."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastcoll.bench.derived import floor_of
from fastcoll.bench.record import medians
from fastcoll.bench.sizes import size_text

__all__ = ["COLORS", "Curve", "draw", "draw_curves", "draw_times", "missing"]

_FLOOR = "memory alone"
COLORS = {
    "text": "#1f2328",
    "muted": "#6e7781",
    "grid": "#d8dee4",
    "ours": "#0969da",
    "shared": "#2b8fe0",
    "gloo": "#bc4c00",
    "others": "#8250df",
}
"""By meaning, on a light page."""

_UNITS = ((1e6, "s"), (1e3, "ms"), (1, "µs"))


class Curve(NamedTuple):
    """A line: values by message size in bytes; apart is the least ratio of the heights of two names."""

    name: str
    values: Mapping[int, float]
    color: str
    width: float = 2.0
    style: str = "-"
    apart: float = 2.3


def missing() -> str:
    """Returns the text about what to install for drawing, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def draw_curves(axes: Any, curves: Sequence[Curve], colors: Mapping[str, str]) -> None:
    """Draws curves over message sizes on logarithmic axes, each with its name at its end."""
    axes.set(xscale="log", yscale="log")
    lowest = math.inf
    for curve in sorted(curves, key=lambda each: -list(each.values.values())[-1]):
        sizes, values = list(curve.values), list(curve.values.values())
        bold = curve.width > 4
        style = {"color": curve.color, "linewidth": curve.width, "linestyle": curve.style}
        axes.plot(sizes, values, zorder=3 if bold else 2, **style)
        lowest = min(values[-1], lowest / curve.apart)  # names do not touch
        axes.annotate(
            curve.name,
            (sizes[-1], lowest),
            (9, 0),
            textcoords="offset points",
            va="center",
            color=curve.color,
            fontsize=10,
            fontweight="bold" if bold else "normal",
            annotation_clip=False,
        )
    sizes = sorted({size for curve in curves for size in curve.values})
    shown = sizes[:: max(1, len(sizes) // 4)]
    axes.set_xticks(shown, [size_text(size) for size in shown])
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=colors["text"], labelsize=10)
    axes.grid(color=colors["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("message size", color=colors["text"], fontsize=10)


def draw_times(axes: Any, curves: Sequence[Curve], colors: Mapping[str, str]) -> None:
    """Draws times in microseconds, at ticks that have a unit."""
    draw_curves(axes, curves, colors)
    times = [time for curve in curves for time in curve.values.values() if time > 0]
    first, last = (math.log10(limit(times)) for limit in (min, max))
    ticks = [10**power for power in range(math.floor(first), math.ceil(last) + 1)]
    axes.set_yticks(ticks, list(map(_time_text, ticks)))
    axes.set_ylim(0.7 * min(times), 1.4 * max(times))


def _time_text(microseconds: float) -> str:
    scale, unit = next((each for each in _UNITS if microseconds >= each[0]), _UNITS[-1])
    return f"{microseconds / scale:g} {unit}"


def _kind(case: dict[str, Any]) -> tuple[str, str, str]:
    return case["collective"], case["dtype"], case["op"]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: the median times of each collective, dtype and op, and of memory alone.

    Args:
        record: Record of a run over sizes.
        path: The file; its suffix selects the format.
    """
    cases = [case for case in record["cases"] if case["size"] and case["backends"]]
    kinds = list(dict.fromkeys(map(_kind, cases)))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(7.4, 4.3 * max(1, len(kinds))), layout="constrained"
    )
    panels = figure.subplots(max(1, len(kinds)), 1, squeeze=False)[:, 0]
    for axes, kind in zip(panels, kinds, strict=False):  # without a case, one panel is empty
        here = [case for case in cases if _kind(case) == kind]
        axes.spines[:].set_visible(False)
        what = " ".join(word for word in kind if word != "none")
        title = f"Time of a call: {what}, {record['world_size']} ranks (lower is better)"
        axes.set_title(title, loc="left", color=COLORS["text"], fontsize=11)
        draw_times(axes, _curves_of(here, record["backends"]), COLORS)
    machine = record["machine"]
    caption = f"{machine['cpu']}, {machine['cores_allowed']} cores, {record['date'][:10]}, medians"
    figure.supxlabel(caption, x=0.01, ha="left", color=COLORS["muted"], fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _curves_of(cases: Sequence[dict[str, Any]], backends: Sequence[str]) -> list[Curve]:
    """Returns the curve of each backend that was timed, and that of memory alone, if there is one."""
    colors = {"fastcoll": COLORS["ours"], "gloo": COLORS["gloo"]}
    others = iter(
        (COLORS["muted"], COLORS["others"], COLORS["shared"], COLORS["text"]) * len(backends)
    )
    curves = []
    for name in backends:
        values = {case["size"]: medians(case)[name] for case in cases if name in medians(case)}
        if values:
            color = colors.get(name) or next(others)
            curves.append(Curve(name, values, color, 4.5 if name == "fastcoll" else 2.0))
    floors = {case["size"]: floor_of(case) for case in cases}
    floor = {size: each["median"] for size, each in floors.items() if each}
    return [*curves, *([Curve(_FLOOR, floor, COLORS["text"], 1.2, "--")] if floor else [])]
