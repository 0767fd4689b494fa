"""Draws what ``fastcoll.bench.parity`` records: losses, and how far runs are apart on the held-out set."""

from __future__ import annotations

import statistics
from typing import Any

from fastcoll.bench.plot import new_figure, save

__all__ = ["draw"]


def draw(record: dict[str, Any], path: str) -> None:
    """Writes a picture: for each task the losses step by step, and distances from gloo's run on the held-out set.

    Args:
        record: What ``--json`` writes.
        path: The file; its suffix selects the format.
    """
    figure = new_figure(10, 3.6 * len(record["tasks"]))
    rows = figure.subplots(len(record["tasks"]), 2, squeeze=False)
    for (left, right), (name, case) in zip(rows, record["tasks"].items(), strict=True):
        losses = case["losses"]
        left.plot(losses["gloo"], color="0.7", linewidth=4, label="gloo, stock DDP")
        left.plot(losses["float32"], color="C0", linewidth=1.2, label="fastcoll's hook, float32")
        left.plot(
            losses["bfloat16 wire"],
            color="C3",
            linewidth=0.8,
            linestyle="--",
            label="bfloat16 wire",
        )
        left.set(xlabel="step", ylabel="loss of rank 0's batches", title=name)
        left.legend(fontsize=8)
        held_out = case["held_out"]
        first = held_out["gloo"][0]
        places = [(at + 1) * record["steps"] / len(first) for at in range(len(first))]
        noise = [statistics.stdev(point) for point in zip(*held_out["gloo"], strict=True)]
        right.plot(places, noise, color="black", linestyle=":", label="order of the data, gloo")
        for label, color in (("bfloat16 wire", "C3"), ("float32", "C0")):
            apart = [abs(a - b) for a, b in zip(held_out[label], first, strict=True)]
            right.plot(places, apart, color=color, marker=".", label=f"{label}, distance from gloo")
        right.set(xlabel="step", ylabel="held-out loss", title=name, ylim=(0, None))
        right.legend(fontsize=8)
    figure.suptitle(
        f"{record['steps']} steps on {record['world_size']} CPU ranks; {record['date'][:10]}"
    )
    save(figure, record, path, dpi=90)
