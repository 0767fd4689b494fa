"""The pictures of README and docs/performance.md, each with the record that it was drawn from.

A picture carries the digest of its record, so that a test can tell a picture that is older than its record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcoll.bench import added_plot, plot
from fastcoll.bench.record import read_record

__all__ = ["PICTURES", "redraw", "stale"]

_RESULTS = Path(__file__).resolve().parent / "results"


def _read(name: str) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        return read_record(_RESULTS / name)

    return read


PICTURES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any], str], None]]] = {
    "all_reduce_cpu_2ranks.png": (_read("all_reduce_cpu_2ranks.jsonl"), plot.draw),
    **{
        f"added_{theme}.svg": (
            _read("ddp_fused_cpu_2ranks.jsonl"),
            functools.partial(added_plot.draw, theme=theme),
        )
        for theme in added_plot.COLORS
    },
}
"""By file name: what returns the record, and what draws it."""


def redraw(folder: Path) -> None:
    """Draws those pictures anew that are not of their records as they are now."""
    for name in stale(folder):
        record, draw = PICTURES[name]
        draw(record(), str(folder / name))


def stale(folder: Path) -> list[str]:
    """Returns the names of the pictures in a folder that are missing or older than their records."""
    return [
        name
        for name, (record, _) in PICTURES.items()
        if plot.drawn_from(folder / name) != plot.digest(record())
    ]
