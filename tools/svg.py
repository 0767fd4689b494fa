"""Pictures as SVG files that have the digest of their records, which shows whether a picture is older than these."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["carried_digest", "digest", "new_figure", "save"]

_DIGEST = "SHA-256 of the records"
# Text stays text, in the reader's font. The file has no version of a library, and always the same ids.
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": _DIGEST,
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
}
_LEFT_OUT = dict.fromkeys(("Creator", "Date", "Format", "Type"))


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


def save(figure: Any, records: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a figure with the digest of its records."""
    drawn = io.StringIO()
    metadata = {**_LEFT_OUT, "Description": f"{_DIGEST}: {digest(records)}"}
    with importlib.import_module("matplotlib").rc_context(_SETTINGS):
        figure.savefig(drawn, format="svg", metadata=metadata)
    path.write_text(_short(drawn.getvalue()))


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
