"""Draws a sweep over sizes, for ``--plot``, and saves pictures.

A picture has the digest of its records, which shows whether it is older than its records.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcoll.bench.collectives import bandwidths

__all__ = ["carried_digest", "digest", "draw", "missing", "new_figure", "save"]

_DIGEST = "SHA-256 of the records"
_FLOOR = "memory floor"
# Text stays text, in the reader's font. The file has no version of a library, and always the same ids.
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": _DIGEST,
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
}
_LEFT_OUT = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def missing() -> str:
    """Returns the text about what to install for drawing, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib, sizes in inches, that needs no display."""
    module = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def digest(records: Sequence[dict[str, Any]]) -> str:
    """Returns a hash of the values of records, independent of the layout of the files."""
    values = json.loads(json.dumps(list(records)))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def save(figure: Any, records: Sequence[dict[str, Any]], path: str) -> None:
    """Writes a figure, and makes its folder; a PNG or SVG has the digest of its records."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    carried = digest(records)
    suffix = Path(path).suffix.lower()
    with importlib.import_module("matplotlib").rc_context(_SETTINGS):
        if suffix == ".svg":
            drawn = io.StringIO()
            metadata = {**_LEFT_OUT, "Description": f"{_DIGEST}: {carried}"}
            figure.savefig(drawn, format="svg", metadata=metadata)
            Path(path).write_text(_short(drawn.getvalue()))
        else:
            text = {_DIGEST: carried} if suffix == ".png" else None
            figure.savefig(path, dpi=120, metadata=text)


def _short(svg: str) -> str:
    """Returns a picture with each path on one line, two decimals, no comments, and no groups of one element."""
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="\w+">\s*(<path [^>]*/>|<text [^<]*</text>)\s*</g>', r"\1", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: f' d="{" ".join(path[0][4:-1].split())}"', svg)
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", svg)


def carried_digest(path: Path) -> str | None:
    """Returns the digest in an SVG, or None if the file has none or is missing."""
    found = re.search(rf"{_DIGEST}: (\w+)", path.read_text()) if path.is_file() else None
    return found and found[1]


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
    figure = new_figure(11, 4.2 * max(1, len(kinds)))
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
    save(figure, [record], path)
