"""What a training printed, and what several of them say together."""

import json
import math
import statistics
from typing import Any

_MARK = "CLIENT "
_KEYS = ("losses", "step_seconds", "steps", "ranks", "served_by", "versions")


def has_result(printed: str) -> bool:
    """Return whether a training came to its end."""
    return any(line.startswith(_MARK) for line in printed.splitlines())


def parsed(printed: str, backend: str, ranks: int) -> dict[str, Any]:
    """Return the result that a training printed.

    Raises RuntimeError if it printed none, or more than one, or if its groups were not all served by
    this backend.
    """
    found = [line for line in printed.splitlines() if line.startswith(_MARK)]
    if len(found) != 1:
        raise RuntimeError(
            f"expected one line that begins with {_MARK!r}, got {len(found)}:\n{printed[-2000:]}"
        )
    result: dict[str, Any] = json.loads(found[0].removeprefix(_MARK))
    if missing := [key for key in _KEYS if key not in result]:
        raise RuntimeError(f"expected all of {', '.join(_KEYS)}, got none of {', '.join(missing)}")
    if result["served_by"] != [backend]:
        raise RuntimeError(f"expected groups served by {backend}, got {result['served_by']}")
    if result["ranks"] != ranks:
        raise RuntimeError(f"expected {ranks} ranks, got {result['ranks']}")
    return result


def bound(ranks: int) -> float:
    """Return how far, relatively, a loss may lie from gloo's.

    Two ranks have one order of a sum only: not at all. With more, gloo sums in an order of its own, so that
    last bits differ, and a training makes more of them step by step. In float64 tensor parallelism on 4 ranks
    ends within 2e-16 of gloo's, in float32 within 1e-4. DDP that lacks the gradients of one rank is off by
    more than three times this bound within ten steps.
    """
    return 0.0 if ranks <= 2 else 1e-3


def compared(runs: dict[str, list[dict[str, Any]]], ranks: int) -> dict[str, Any]:
    """Return the medians, their ratio, and whether the losses of all steps agree.

    ``same_bits`` tells it exactly; ``difference`` is the largest relative one of all steps.
    """
    losses = {backend: [run["losses"] for run in those] for backend, those in runs.items()}
    ours, theirs = losses["fastcoll"][0], losses["gloo"][0]
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(ours, theirs, strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    difference = math.inf if any(map(math.isnan, differences)) else max(differences)
    seconds = {name: [run["step_seconds"] for run in those] for name, those in runs.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    limit = bound(ranks)
    repeatable = {name: all(one == those[0] for one in those) for name, those in losses.items()}
    return {
        "versions": runs["gloo"][0]["versions"],
        "steps": len(ours),
        "step_seconds": {
            name: {"median": medians[name], "runs": values} for name, values in seconds.items()
        },
        "ratio": medians["gloo"] / medians["fastcoll"],
        "final_loss": {"gloo": theirs[-1], "fastcoll": ours[-1]},
        "same_bits": ours == theirs,
        "difference": difference,
        "bound": limit,
        "repeatable": repeatable,
        "ended_badly": [
            run["ended"] for those in runs.values() for run in those if run["ended"] != "well"
        ],
        "agrees": (ours == theirs or difference <= limit) and repeatable["fastcoll"],
    }
