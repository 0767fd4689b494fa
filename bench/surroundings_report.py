"""What is told of the ways to train a model: each less its base, beside stock DDP and beside the bytes by design."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from fastcoll.bench.attachments import STOCK
from fastcoll.bench.step_measurement import Candidate
from fastcoll.bench.timing import summarise

__all__ = ["HOST_TARGET", "add_ratios", "print_table", "row_of"]

HOST_TARGET = 1 / 3
"""Of the host time that stock DDP adds."""


def row_of(
    candidate: Candidate, base: Candidate, size: int, bytes_per_microsecond: float
) -> dict[str, Any]:
    """Returns the figures of a way to train; `size` is that of all gradients, S."""
    path = candidate.path
    times = {kind: summarise(each) for kind, each in candidate.samples.items()}
    bases = {kind: summarise(each) for kind, each in base.samples.items()}
    row: dict[str, Any] = {
        "name": path.name,
        "base": path.base,
        "passes": path.passes,
        "time": {kind: asdict(each) for kind, each in times.items()},
        "added": {kind: times[kind].median - bases[kind].median for kind in times},
        "plans_made_in_timed_steps": candidate.plans,
    }
    if path.passes is not None:
        row["bytes"] = round(path.passes * size)
        row["bytes_microseconds"] = path.passes * size / bytes_per_microsecond
    if candidate.observed is not None and base.observed is not None:
        added = candidate.observed.less(base.observed)
        row["observed"] = asdict(candidate.observed)
        row["observed_added"] = asdict(added)
        row["around_microseconds"] = added.around_microseconds
    return row


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds to each row what it adds over what stock DDP adds, where that is above the noise.

    It is where the lower quartile of stock DDP's times lies above the upper quartile of its base's.
    """
    named = {row["name"]: row for row in rows}
    stock = named.get(STOCK)
    base = None if stock is None else named.get(stock["base"])
    if stock is None or base is None:
        return
    told = [
        kind
        for kind in ("host", "device")
        if stock["time"][kind]["lower"] > base["time"][kind]["upper"]
    ]
    most = stock["added"]
    for row in rows:
        if row["name"] == row["base"]:
            continue
        for kind in told:
            row[f"of_stock_{kind}"] = row["added"][kind] / most[kind]
        if "of_stock_host" in row:
            row["meets_host_target"] = row["of_stock_host"] <= HOST_TARGET


def print_table(found: dict[str, Any], copy: float) -> None:
    """Prints a table of a model's ways to standard output, and what failed to the other; `copy` in bytes per us."""
    print(
        f"\n{found['model']}: P = {found['tensors']} tensors, S = {found['size'] / 1e6:.1f} MB; a copy moves "
        f"{copy / 1e3:.0f} GB/s. Microseconds more than without data parallelism, medians"
    )
    titles = ("host", "of stock", "device", "around", "coll.", "bytes/S", "floor", "calls")
    print(f"{'':62}" + "".join(f"{title:>9}" for title in titles))
    for row in found["paths"]:
        seen = row.get("observed_added", {})
        cells = (
            row["added"]["host"],
            row.get("of_stock_host"),
            row["added"]["device"],
            row.get("around_microseconds"),
            seen.get("collective_microseconds"),
            row["passes"],
            row.get("bytes_microseconds"),
            seen.get("calls"),
        )
        if row["name"] == row["base"]:
            time_of = row["time"]
            cells = (time_of["host"]["median"], None, time_of["device"]["median"], *[None] * 5)
        digits = (1, 3, 1, 1, 1, 2, 1, 0)
        text = "".join(
            f"{'-':>9}" if cell is None else f"{cell:9.{places}f}"
            for cell, places in zip(cells, digits, strict=True)
        )
        print(f"{row['name']:62}{text}", flush=True)
    for name, reason in found["failed"].items():
        print(f"fastcoll.bench.surroundings: {name}: {reason}", file=sys.stderr)
