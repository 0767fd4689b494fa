"""Draws records: sweeps over sizes, for ``--plot``, and the pictures of README and docs/performance.md.

A picture carries the digest of its record, so that a picture that is older than its record can be told.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastcoll.bench.collectives import bandwidths
from fastcoll.bench.ddp import added
from fastcoll.bench.record import read_record

__all__ = ["PICTURES", "draw", "draw_added", "missing", "redraw", "stale"]

_DIGEST = "SHA-256 of the record"
_RESULTS = Path(__file__).resolve().parent / "results"
_FLOOR = "memory floor"
_WAYS = {
    "gloo": "DDP on Gloo",
    "fastcoll": "DDP on fastcoll (one string)",
    "fastcoll-fused": "and its hook (one call)",
    "fastcoll-sync": "GradientSynchronizer (no DDP)",
}
"""The title of each backend's bar, from the top."""

_COLORS = {"light": ("#1f2328", "#8b949e", "#0969da"), "dark": ("#f0f6fc", "#6e7681", "#4493f8")}
"""Of text, of Gloo's bar and of ours; the background is the page's."""


def missing() -> str:
    """Returns what to install before anything can be drawn, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def _figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib's, of so many inches, that needs no display."""
    module = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _digest(record: dict[str, Any]) -> str:
    """Returns a hash of the record's values, whatever the layout of the file."""
    values = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _save(figure: Any, record: dict[str, Any], path: str) -> None:
    """Writes a figure, and makes its folder; a PNG or SVG carries the digest of its record."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    digest = _digest(record)
    carried = f"{_DIGEST}: {digest}"
    metadata = {".png": {_DIGEST: digest}, ".svg": {"Description": carried, "Date": None}}
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": _DIGEST}):
        figure.savefig(path, dpi=120, metadata=metadata.get(Path(path).suffix.lower()))


def _drawn_from(path: Path) -> str | None:
    """Returns the digest that a PNG or SVG carries, or None where the file has none or is missing."""
    if not path.is_file():
        return None
    if path.suffix == ".svg":
        found = re.search(rf"{_DIGEST}: (\w+)", path.read_text())
        return found and found[1]
    with importlib.import_module("PIL.Image").open(path) as picture:
        carried: str | None = picture.text.get(_DIGEST)
    return carried


def _kind(case: dict[str, Any]) -> tuple[str, str, str]:
    return case["collective"], case["dtype"], case["op"]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: a row for each collective, dtype and op; bands are the quartiles.

    Args:
        record: Of a run over sizes.
        path: The file; its suffix selects the format.
    """
    cases = [case for case in record["cases"] if case["size"] and case["backends"]]
    kinds, ranks = list(dict.fromkeys(map(_kind, cases))), record["world_size"]
    figure = _figure(11, 4.2 * max(1, len(kinds)))
    axes = figure.subplots(max(1, len(kinds)), 2, squeeze=False)
    for (latency, bandwidth), kind in zip(axes, kinds, strict=False):
        for name in (*record["backends"], _FLOOR):
            rows = [
                (case["size"], row["time"])
                for case in cases
                if _kind(case) == kind
                and (row := {**case["backends"], _FLOOR: case["floor"]}.get(name))
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
    _save(figure, record, path)


def draw_added(record: dict[str, Any], path: str, theme: str = "light") -> None:
    """Writes a picture of a run of ``python -m fastcoll.bench ddp``: what each way to train adds to a step.

    By medians, of its first model with default buckets.
    """
    row = record["cases"][0]
    more = {
        case["backend"]: each.by_median / 1e3
        for case, each in zip(row["cases"], added(row), strict=True)
        if case["buckets"] == "default buckets"
    }
    text, theirs, ours = _COLORS[theme]
    figure = _figure(5.8, 2.2)
    axes = figure.subplots()
    times = [more[name] for name in _WAYS]
    bars = axes.barh(list(_WAYS.values()), times, color=[theirs] + [ours] * 3, height=0.62)
    labels = [f"{time:.1f} ms ({times[0] / time:.1f}x)" for time in times]
    labels[0] = f"{times[0]:.1f} ms"
    axes.bar_label(bars, labels, padding=5, color=text, fontsize=10)
    axes.set_xlim(0, times[0] * 1.2)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=text, labelsize=10)
    axes.spines[:].set_visible(False)
    title = "Time that data parallelism adds to a step (lower is better)"
    figure.suptitle(title, x=0.01, ha="left", color=text, fontsize=11)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    _save(figure, record, path)


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any], str], None]]] = {
    "all_reduce_cpu_2ranks.png": ("all_reduce_cpu_2ranks", draw),
    "added_light.svg": ("ddp_fused_cpu_2ranks", partial(draw_added, theme="light")),
    "added_dark.svg": ("ddp_fused_cpu_2ranks", partial(draw_added, theme="dark")),
}
"""By file name: its record in bench/results, and what draws it."""


def redraw(path: Path) -> None:
    """Draws the picture of that name anew."""
    record, paint = PICTURES[path.name]
    paint(read_record(_RESULTS / f"{record}.jsonl"), str(path))


def stale(folder: Path) -> list[str]:
    """Returns the names of the pictures in a folder that are missing or older than their records."""
    return [
        name
        for name, (record, _) in PICTURES.items()
        if _drawn_from(folder / name) != _digest(read_record(_RESULTS / f"{record}.jsonl"))
    ]
