"""The pictures of README and docs/, each from records in bench/results, for a light and a dark page.

The caption of a picture has its content, the machine and the date of measurement.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repository import ROOT
from svg import carried_digest, digest, new_figure, save

from fastcoll.bench.derived import added, floor_of
from fastcoll.bench.record import medians, read_record
from fastcoll.bench.sizes import size_text

__all__ = [
    "FAULT_GROUPS",
    "HOSTS",
    "PICTURES",
    "Picture",
    "all_reduces",
    "faults_of_both",
    "redraw",
    "stale",
]

Record = dict[str, Any]
_RESULTS = ROOT / "bench" / "results"


Theme = dict[str, str]
_COLORS = {
    "text": ("#1f2328", "#f0f6fc"),
    "muted": ("#6e7781", "#9198a1"),
    "grid": ("#d8dee4", "#3d444d"),
    "neutral": ("#f3f5f7", "#2a313c"),
    "ours": ("#0969da", "#4493f8"),
    "shared": ("#2b8fe0", "#a5d6ff"),
    "gloo": ("#bc4c00", "#f0883e"),
    "loss": ("#d1242f", "#f85149"),
    "as specified": ("#0072b2", "#56b4e9"),
}
"""By meaning, on a light and on a dark page, whose background shows; colour-blind readers can tell them apart."""

THEMES: dict[str, Theme] = {
    theme: {name: colors[index] for name, colors in _COLORS.items()}
    for index, theme in enumerate(("light", "dark"))
}
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


def _draw_added(records: Sequence[Record], theme: Theme) -> Any:
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


def _added_shown(records: Sequence[Record]) -> str:
    case = records[0]["cases"][0]
    return f"Gradients of {case['model']} ({case['size'] / 1e6:.0f} MB), 2 ranks, medians."


# --- all_reduce on one host ----------------------------------------------------------------------

_SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 26)
_TIMES = {1: "1 µs", 10: "10 µs", 100: "100 µs", 1e3: "1 ms", 1e4: "10 ms", 1e5: "100 ms"}


def all_reduces(record: Record) -> list[Record]:
    """Returns the cases of all_reduce."""
    return [case for case in record["cases"] if case["collective"] == "all_reduce"]


def _draw_all_reduce(records: Sequence[Record], theme: Theme) -> Any:
    cases = all_reduces(records[0])
    sizes = [case["size"] for case in cases]

    title = "Time of an all_reduce call (lower is better)"
    figure, axes = _canvas(7.4, 4.3, title, theme)
    floors = [floor_of(case) for case in cases]
    floor = [math.nan if one is None else one["median"] for one in floors]
    names = ("gloo", "mpi", "fastcoll", "fastcoll-plan")
    gloo, mpi, ours, plan = ([medians(case)[name] for case in cases] for name in names)
    curves = (
        ("Gloo", gloo, theme["gloo"], 2.0, "-"),
        ("Intel MPI", mpi, theme["muted"], 2.0, "-"),
        ("fastcoll", ours, theme["ours"], 4.5, "-"),
        ("fastcoll, a plan", plan, theme["shared"], 2.0, "-"),
        ("memory alone", floor, theme["text"], 1.2, "--"),
    )
    axes.set(xscale="log", yscale="log", xlim=(3, 9e7), ylim=(0.3, 2e5))
    lowest = math.inf
    for name, times, color, width, style in curves:
        order = 3 if name == "fastcoll" else 2
        axes.plot(sizes, times, color=color, linewidth=width, linestyle=style, zorder=order)
        lowest = min(times[-1], lowest / 2.3)  # labels do not touch
        axes.annotate(
            name,
            (sizes[-1], lowest),
            (9, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=10,
            fontweight="bold" if name == "fastcoll" else "normal",
            annotation_clip=False,
        )
    axes.set_xticks(_SIZES, [size_text(size) for size in _SIZES])
    axes.set_yticks(list(_TIMES), list(_TIMES.values()))
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=theme["text"], labelsize=10)
    axes.grid(color=theme["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("message size", color=theme["text"], fontsize=10)
    return figure


def _all_reduce_shown(records: Sequence[Record]) -> str:
    times = {case["size"]: medians(case) for case in all_reduces(records[0])}
    least = min(each["gloo"] / each["fastcoll"] for each in times.values())
    behind = [size for size, each in times.items() if each["mpi"] < each["fastcoll"]]
    ahead = sum(each["mpi"] > each["fastcoll-plan"] for each in times.values())
    return (
        f"fastcoll is at least {int(least * 10) / 10}x faster than Gloo at each size. Intel MPI is faster up to "
        f"{size_text(max(behind))}. A plan is faster than Intel MPI at {ahead} of {len(times)} sizes. float32, 2 "
        "ranks, medians."
    )


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


def _draw_faults(records: Sequence[Record], theme: Theme) -> Any:
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


def _draw_hosts(records: Sequence[Record], theme: Theme) -> Any:
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


def _hosts_shown(records: Sequence[Record]) -> str:
    cases = [case for record in records for case in record["cases"] if case["bytes"]]
    ratios = [round(case["fastcoll"]["ms"] / case["gloo"]["ms"], 2) for case in cases]
    return (
        f"fastcoll is slower in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cases, by "
        f"{max(ratios) - 1:.0%} at most. Emulated hosts, links of {records[0]['megabits'] / 1e3:g} Gbit/s, medians."
    )


# -------------------------------------------------------------------------------------------------


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
        return [read_record(_RESULTS / f"{name}.jsonl") for name in self.records]


PICTURES = {
    "added": Picture(
        ("ddp_cpu_2ranks",),
        _draw_added,
        _added_shown,
        "Bar chart of the time that data parallelism adds to a training step, in ms",
        640,
    ),
    "all_reduce": Picture(
        ("collectives_cpu_2ranks",),
        _draw_all_reduce,
        _all_reduce_shown,
        "Time of all_reduce against the message size, by fastcoll, Gloo and Intel MPI",
        740,
    ),
    "faults": Picture(
        ("faults_cpu",),
        _draw_faults,
        lambda _: "Faults that ran on both.",
        "A dot for each fault, coloured by its outcome, for Gloo and for fastcoll",
        740,
    ),
    "hosts": Picture(
        tuple(f"hosts_{shape}_1000mbit_cpu" for shape in HOSTS),
        _draw_hosts,
        _hosts_shown,
        "Heat map of fastcoll's time over Gloo's, by collective and message size, on four sets of hosts",
        860,
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
