"""What a picture of README or docs/ shows: one function draws records of bench/results, in the colours of a theme."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import one_gpu
from svg import new_figure

from fastcoll.bench.derived import added, floor_of
from fastcoll.bench.plot import COLORS, Curve, draw_curves, draw_times
from fastcoll.bench.record import medians
from fastcoll.bench.sizes import size_text

__all__ = [
    "FAULT_GROUPS",
    "HOSTS",
    "THEMES",
    "Record",
    "Theme",
    "all_reduces",
    "draw_added",
    "draw_all_reduce",
    "draw_faults",
    "draw_frameworks",
    "draw_gpu",
    "draw_hosts",
    "draw_ranks",
    "faults_of_both",
]

Record = dict[str, Any]
Theme = dict[str, str]
THEMES: dict[str, Theme] = {
    "light": {**COLORS, "neutral": "#f3f5f7", "loss": "#d1242f", "as specified": "#0072b2"},
    "dark": {
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "grid": "#3d444d",
        "neutral": "#2a313c",
        "ours": "#4493f8",
        "shared": "#a5d6ff",
        "gloo": "#f0883e",
        "loss": "#f85149",
        "as specified": "#56b4e9",
    },
}
"""Colours by meaning, for a light and a dark page, whose background shows; colour-blind readers can tell them apart."""

_OTHER_VERDICTS = ("#e69f00", "#7f7f7f", "#cc79a7", "#d55e00")  # Okabe, Ito, 2008, and grey


def _canvas(width: float, height: float, title: str, theme: Theme) -> tuple[Any, Any]:
    """Returns a figure with a title and its axes, without a background and a frame."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    for each in (figure, axes):
        each.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", color=theme["text"], fontsize=11)
    return figure, axes


# --- added time of a training step ---------------------------------------------------------------

_WAYS = {
    "gloo": "DDP on Gloo",
    "fastcoll": "DDP on fastcoll (one string)",
    "fastcoll-fused": "and its hook (one call)",
    "fastcoll-sync": "GradientSynchronizer (no DDP)",
}
"""The title of each backend's bar, from the top."""


def draw_added(records: Sequence[Record], theme: Theme) -> Any:
    """Draws the median time that each way to train adds to a step of the first model, with default buckets."""
    row = records[0]["cases"][0]
    more = {
        case["backend"]: each.by_median / 1e3
        for case, each in added(row)
        if case["buckets"] == "default buckets"
    }
    title = "Time that data parallelism adds to a step (lower is better)"
    figure, axes = _canvas(5.8, 2.2, title, theme)
    times = [more[name] for name in _WAYS]
    colors = [theme["muted"], *[theme["ours"]] * 3]
    bars = axes.barh(list(_WAYS.values()), times, color=colors, height=0.62)
    labels = [f"{time:.1f} ms ({times[0] / time:.1f}x)" for time in times]
    labels[0] = f"{times[0]:.1f} ms"
    axes.bar_label(bars, labels, padding=5, color=theme["text"], fontsize=10)
    axes.set_xlim(0, times[0] * 1.2)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=theme["text"], labelsize=10)
    return figure


# --- all_reduce on one host ----------------------------------------------------------------------


def all_reduces(record: Record) -> list[Record]:
    """Returns the cases of all_reduce."""
    return [case for case in record["cases"] if case["collective"] == "all_reduce"]


def draw_all_reduce(records: Sequence[Record], theme: Theme) -> Any:
    """Draws the time of an all_reduce over the message size, by library."""
    cases = all_reduces(records[0])
    floors = {case["size"]: floor_of(case) for case in cases}
    floor = {size: each["median"] for size, each in floors.items() if each}

    def by(name: str) -> dict[int, float]:
        return {case["size"]: medians(case)[name] for case in cases}

    figure, axes = _canvas(7.4, 4.3, "Time of an all_reduce call (lower is better)", theme)
    curves = [
        Curve("Gloo", by("gloo"), theme["gloo"]),
        Curve("Intel MPI", by("mpi"), theme["muted"]),
        Curve("fastcoll", by("fastcoll"), theme["ours"], 4.5),
        Curve("fastcoll, a plan", by("fastcoll-plan"), theme["shared"]),
        Curve("memory alone", floor, theme["text"], 1.2, "--"),
    ]
    draw_times(axes, curves, theme)
    return figure


def draw_ranks(records: Sequence[Record], theme: Theme) -> Any:
    """Draws Gloo's time over fastcoll's, over the message size, by number of ranks."""
    title = "all_reduce on 16 cores: time of Gloo / time of fastcoll (higher is better)"
    figure, axes = _canvas(7.4, 3.4, title, theme)
    colors = (theme["ours"], theme["gloo"], theme["muted"])
    curves = []
    for record, color in zip(records, colors, strict=True):
        times = {case["size"]: medians(case) for case in all_reduces(record)}
        ratios = {size: each["gloo"] / each["fastcoll"] for size, each in times.items()}
        curves.append(Curve(f"{record['world_size']} ranks", ratios, color, 2.5, apart=1.45))
    draw_curves(axes, curves, theme)
    ticks = (1, 3, 10, 30, 100, 300)
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_ylim(1, 600)
    return figure


# --- faults --------------------------------------------------------------------------------------

FAULT_GROUPS = {
    "as specified": ("as wanted",),
    "other error, or late": ("not as wanted", "too slow"),
    "wrong result": ("wrong result", "left behind"),
    "hang": ("hang",),
    "crash": ("crash",),
}
"""The verdicts of a record, by their name in the picture."""


def faults_of_both(record: Record) -> list[tuple[int, int]]:
    """Returns the groups of gloo's and fastcoll's verdict for each fault of both, sorted by gloo's group."""
    groups = {
        verdict: group
        for group, verdicts in enumerate(FAULT_GROUPS.values())
        for verdict in verdicts
    }
    found = []
    for case in record["cases"]:
        backends = [case["backends"].get(name, {}) for name in ("gloo", "fastcoll")]
        gloo, ours = (groups.get(one.get("verdict")) for one in backends)
        if gloo is not None and ours is not None:
            found.append((gloo, ours))
    return sorted(found)


def draw_faults(records: Sequence[Record], theme: Theme) -> Any:
    """Draws a dot for each injected fault, coloured by its outcome, for each backend."""
    found = faults_of_both(records[0])
    count = len(found)
    title = f"Outcomes of {count} injected faults (each column is a fault)"
    figure, axes = _canvas(7.4, 2.1, title, theme)
    colors = (theme["as specified"], *_OTHER_VERDICTS)
    style = {"color": theme["text"], "fontsize": 10}
    # A gap between groups.
    at = [column + 1.1 * gloo for column, (gloo, _) in enumerate(found)]
    for line, name in enumerate(("Gloo", "fastcoll")):
        for group, color in enumerate(colors):
            here = [x for x, fault in zip(at, found, strict=True) if fault[line] == group]
            if here:
                axes.scatter(here, [line] * len(here), s=38, color=color, linewidths=0)
        axes.text(-2, line, name, ha="right", va="center", color=theme["text"], fontsize=11)
    for group, title in enumerate(FAULT_GROUPS):
        here = [x for x, (gloo, _) in zip(at, found, strict=True) if gloo == group]
        if here:
            wide = len(here) > 15
            text = (
                f"{len(here)} {title}"
                if wide
                else "\n".join([str(len(here)), *title.split(" ", 1)])
            )
            axes.text((here[0] + here[-1]) / 2, -0.45, text, ha="center", va="bottom", **style)
    same = sum(ours == 0 for _, ours in found)
    text = f"{same} of {count} {next(iter(FAULT_GROUPS))}"
    axes.text(at[0] - 0.5, 1.45, text, ha="left", va="top", **style)
    axes.set(xlim=(-8, at[-1] + 1), ylim=(1.9, -1.75))
    axes.axis("off")
    return figure


# --- several hosts -------------------------------------------------------------------------------

HOSTS = {"2x2": "2 hosts of 2", "2x4": "2 hosts of 4", "3x2": "3 hosts of 2", "4x1": "4 hosts of 1"}
"""The title of each shape: number of hosts, and ranks on each."""


def _mixed(one: str, other: str, share: float) -> tuple[float, ...]:
    """Returns a colour between two others."""
    to_rgb = importlib.import_module("matplotlib.colors").to_rgb
    return tuple(a + (b - a) * share for a, b in zip(to_rgb(one), to_rgb(other), strict=True))


def _heat(ratio: float, theme: Theme) -> tuple[float, ...]:
    """Returns the colour of a time over gloo's: blue below 1, red above; red is never pale."""
    if ratio > 1:
        return _mixed(
            theme["neutral"], theme["loss"], min(1, 0.55 + 0.45 * math.log(ratio) / math.log(1.3))
        )
    return _mixed(theme["neutral"], theme["ours"], min(1, math.log(ratio) / math.log(0.12)))


def draw_hosts(records: Sequence[Record], theme: Theme) -> Any:
    """Draws the ratio of times of each collective and size, on each set of hosts."""
    rectangle = importlib.import_module("matplotlib.patches").Rectangle
    title = "Time of fastcoll / time of Gloo (blue: faster, red: slower)"
    figure, axes = _canvas(8.6, 4.2, title, theme)
    calls = list(dict.fromkeys(case["call"] for case in records[0]["cases"] if case["bytes"]))
    sizes = sorted({case["bytes"] for case in records[0]["cases"] if case["bytes"]})
    wide = len(sizes) + 0.35
    for panel, (record, title) in enumerate(zip(records, HOSTS.values(), strict=True)):
        left = panel * wide
        for case in record["cases"]:
            if not case["bytes"]:
                continue
            x, y = left + sizes.index(case["bytes"]), calls.index(case["call"])
            ratio = round(case["fastcoll"]["ms"] / case["gloo"]["ms"], 2)
            color = _heat(ratio, theme)
            axes.add_patch(rectangle((x, y), 0.95, 0.92, color=color, linewidth=0))
            bright = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 0.55
            style = {"color": "#1f2328" if bright else "#ffffff", "fontsize": 9}
            weight = "bold" if ratio > 1 else "normal"
            centre = {"ha": "center", "va": "center", "in_layout": False}
            axes.text(x + 0.475, y + 0.48, f"{ratio:.2f}", fontweight=weight, **centre, **style)
        middle = left + len(sizes) / 2
        axes.text(middle, -0.95, title, ha="center", va="bottom", color=theme["text"], fontsize=10)
        for column, size in enumerate(sizes):
            text, x = size_text(size), left + column + 0.475
            axes.text(x, -0.12, text, ha="center", va="bottom", color=theme["muted"], fontsize=8)
    for row, call in enumerate(calls):
        axes.text(
            -0.15, row + 0.48, call, ha="right", va="center", color=theme["text"], fontsize=10
        )
    axes.set(xlim=(-2.2, len(HOSTS) * wide - 0.35), ylim=(len(calls), -1.6))
    axes.axis("off")
    return figure


# --- frameworks ----------------------------------------------------------------------------------


def draw_frameworks(records: Sequence[Record], theme: Theme) -> Any:
    """Draws a framework's speed-up over Gloo as a dot for each number of ranks."""
    clients = sorted(records[0]["cases"], key=lambda one: -one["ranks"]["2"]["ratio"])
    title = "Training step: time of Gloo / time of fastcoll (right is better)"
    figure, axes = _canvas(7.4, 3.9, title, theme)
    names = [client["title"] for client in clients]
    for ranks, color in (("4", theme["gloo"]), ("2", theme["ours"])):
        ratios = [client["ranks"][ranks]["ratio"] for client in clients]
        axes.scatter(
            ratios, names, s=62, color=color, linewidths=0, label=f"{ranks} ranks", zorder=3
        )
    axes.axvline(1, color=theme["text"], linewidth=1)
    axes.invert_yaxis()
    first, last = min(0.95, axes.get_xlim()[0]), axes.get_xlim()[1]
    ticks = [each / 4 for each in range(math.ceil(4 * first), 1 + math.ceil(4 * last))]
    axes.set_xticks(ticks, [f"{each:g}x" for each in ticks])
    axes.set_xlim(first, ticks[-1])
    axes.tick_params(length=0, labelcolor=theme["text"], labelsize=10)
    axes.grid(color=theme["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, labelcolor=theme["text"], fontsize=10, loc="lower right")
    return figure


# --- one GPU -------------------------------------------------------------------------------------


def draw_gpu(_: Sequence[Record], theme: Theme) -> Any:
    """Draws the figures of one GPU: a pair of bars for each, on a scale of its own."""
    title = "One H200: PyTorch and fastcoll"
    figure, axes = _canvas(7.4, 3.6, title, theme)
    for row, one in enumerate(one_gpu.figures()):
        unit = f" {one.unit}".rstrip().replace("us", "µs")
        better = "higher" if one.unit == "GB/s" else "lower"
        what = f"{one.what.replace('`', '')} ({better} is better)"
        axes.text(0, 3 * row - 0.75, what, color=theme["muted"], fontsize=10, va="bottom")
        most = max(one.fastcoll, one.pytorch)
        others = one.against or "PyTorch's nccl"
        pair = ((others, one.pytorch, theme["muted"]), ("fastcoll", one.fastcoll, theme["ours"]))
        for line, (name, value, color) in enumerate(pair):
            y = 3 * row + line * 0.9
            axes.barh(y, value / most, color=color, height=0.72)
            label = f"{value:.{one.digits}f}{unit}"
            style = {"color": theme["text"], "fontsize": 10, "va": "center"}
            axes.text(value / most + 0.012, y, label, **style)
            axes.text(-0.012, y, name, ha="right", **style)
    axes.set(xlim=(-0.27, 1.14), ylim=(3 * len(one_gpu.figures()) - 0.9, -1.7))
    axes.axis("off")
    return figure
