"""Draws what data parallelism adds to a training step, a bar for each way: the picture of README."""

from __future__ import annotations

from typing import Any

from fastcoll.bench.ddp import added
from fastcoll.bench.plot import new_figure, save

__all__ = ["draw"]

WAYS = {
    "gloo": "DDP on Gloo",
    "fastcoll": "DDP on fastcoll (one string)",
    "fastcoll-fused": "and its hook (one call)",
    "fastcoll-sync": "GradientSynchronizer (no DDP)",
}
"""The title of each backend's bar, from the top."""

COLORS = {"light": ("#1f2328", "#8b949e", "#0969da"), "dark": ("#f0f6fc", "#6e7681", "#4493f8")}
"""Of text, of Gloo's bar and of ours; the background is the page's."""


def draw(record: dict[str, Any], path: str, theme: str = "light") -> None:
    """Writes a picture of a run of ``python -m fastcoll.bench ddp``: medians of its first model's default buckets."""
    row = record["cases"][0]
    more = {
        case["backend"]: each.by_median / 1e3
        for case, each in zip(row["cases"], added(row), strict=True)
        if case["buckets"] == "default buckets"
    }
    text, theirs, ours = COLORS[theme]
    figure = new_figure(5.8, 2.2)
    axes = figure.subplots()
    times = [more[name] for name in WAYS]
    bars = axes.barh(list(WAYS.values()), times, color=[theirs] + [ours] * 3, height=0.62)
    labels = [f"{time:.1f} ms" for time in times]
    labels[1:] = [f"{time:.1f} ms ({times[0] / time:.1f}x)" for time in times[1:]]
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
    save(figure, record, path, dpi=120)
