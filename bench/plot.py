"""Draws latency and bandwidth against size from what ``--json`` records."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from fastcoll.bench.collectives import bandwidths

__all__ = ["digest", "draw", "drawn_from", "missing", "new_figure", "save"]

_DIGEST = "SHA-256 of the record"


def missing() -> str:
    """Returns what to install before :func:`draw` can work, or "" if nothing is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures need matplotlib: pip install matplotlib, or pip install 'fastcoll[bench]'"
    return ""


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib's, of so many inches, that needs no display."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def digest(record: dict[str, Any]) -> str:
    """Returns what a picture carries of its record: a hash of its values, whatever the layout of the file."""
    values = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def save(figure: Any, record: dict[str, Any], path: str, dpi: int) -> None:
    """Writes a figure, and makes its folder; a PNG or SVG carries the digest of the record that it was drawn from."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    suffix, carried = Path(path).suffix.lower(), f"{_DIGEST}: {digest(record)}"
    metadata = {".png": {_DIGEST: digest(record)}, ".svg": {"Description": carried, "Date": None}}
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": _DIGEST}):
        figure.savefig(path, dpi=dpi, metadata=metadata.get(suffix))


def drawn_from(path: Path) -> str | None:
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


def _bus(case: dict[str, Any], ranks: int, time: dict[str, float]) -> float:
    return bandwidths(case["collective"], case["size"], ranks, time["median"])[1]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: a row for each collective, dtype and op; bands are the quartiles.

    Args:
        record: Of a run over sizes.
        path: The file; its suffix selects the format.
    """
    cases = [case for case in record["cases"] if case["size"] and case["backends"]]
    kinds, ranks = list(dict.fromkeys(map(_kind, cases))), record["world_size"]
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
                sizes,
                [_bus(case, ranks, time) for case, time in zip(here, times, strict=True)],
                marker="o",
                markersize=3,
                label=name,
            )
        floored = [case for case in of_kind if case["floor"]]
        if floored:
            sizes = [case["size"] for case in floored]
            for axis, values in (
                (latency, [case["floor"]["time"]["median"] for case in floored]),
                (bandwidth, [_bus(case, ranks, case["floor"]["time"]) for case in floored]),
            ):
                axis.plot(sizes, values, color="black", linestyle="--", label="memory floor")
        title = " ".join(word for word in kind if word != "none")
        for axis, what in ((latency, "time per call (us)"), (bandwidth, "bus bandwidth (GB/s)")):
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=what)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{title}, {ranks} ranks")
            axis.grid(True, which="major", alpha=0.3)
            axis.legend()
    machine = record["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores_allowed']} cores; {record['date']}")
    save(figure, record, path, dpi=120)
