"""What DistributedDataParallel adds to a training step: a step with it less the same step without it.

Forward and backward are emulated, so that nearly all of the difference is communication and the copies
around it. For each backend stock DDP is measured with its default buckets, whose communication may overlap
the backward pass, and with one bucket for all, whose communication can only follow it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from fastcoll.bench import report
from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.machine import available_memory
from fastcoll.bench.options import DTYPES
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.quiet import measure_in_quiet
from fastcoll.bench.run import Run
from fastcoll.bench.timing import Timing
from fastcoll.bench.turn import Call, TimedCall

__all__ = ["Added", "added", "compare_steps"]

_ALONE = "no DDP"
_BUCKETS: dict[str, dict[str, Any]] = {
    "default buckets": {},
    "one bucket": {"bucket_cap_mb": 1 << 20},
}
_LABEL_WIDTH = 28
_TITLES = ("step(ms)", "q1", "q3", "min", "added(ms)", "best", "#wrong", "ratio")


class _Step(TimedCall):
    """A training step, whose gradients are kept until the end of the turn only: one model has some at a time.

    Args:
        model: What is called for the loss.
        device: Of its parameters.
        kept: Whether a step adds to the gradients of the step before, which it has zeroed, instead of making its own.
    """

    def __init__(self, model: nn.Module, device: torch.device, kept: bool) -> None:
        super().__init__(self._step, device)
        self._model = model
        self._kept = kept

    def _step(self) -> None:
        self._model.zero_grad(set_to_none=not self._kept)
        self._model().backward()

    def forget(self) -> None:
        """Frees the gradients."""
        self._model.zero_grad(set_to_none=True)

    def turn(self, meet: Call, warmup: int, calls: int) -> list[float]:
        """Takes a turn."""
        try:
            if self._kept:
                self._step()  # makes them
            return super().turn(meet, warmup, calls)
        finally:
            self.forget()


def _own_value(rank: int) -> float:
    return 3.0 if rank % 2 else 1.0


def _count_wrong(model: nn.Module, ranks: range) -> int:
    """Returns how many elements of the gradients are not the mean over these ranks."""
    mean = sum(map(_own_value, ranks)) / len(ranks)
    wrong = 0
    for weight in model.parameters():
        if weight.grad is None:
            wrong += weight.numel()
            continue
        allowed = 0.0 if len(ranks) <= 2 else len(ranks) * torch.finfo(weight.dtype).eps * mean
        wrong += int((~((weight.grad - mean).abs() <= allowed)).sum())
    return wrong


def _too_large(run: Run, size: int) -> str:
    """Returns why a model does not fit into the memory of this host, or ""."""
    if run.device.type != "cpu":
        return ""
    # Parameters and gradients, which all models share or have in turn; buckets of each DDP.
    needed = (
        size
        * (2 + len(_BUCKETS) * len(run.peers))
        * int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size))
    )
    available = available_memory()
    if needed <= 0.9 * available:
        return ""
    return (
        f"it takes {needed / 2**30:.0f} GiB of the {available / 2**30:.0f} GiB that are free: "
        "name fewer backends, or halve it with -d bfloat16"
    )


class Added(NamedTuple):
    """What a backend adds to a step.

    Attributes:
        by_median: Over the step without DDP, in microseconds, by medians.
        by_minimum: The same by minima.
        ratio: How many times less it adds than the backend that adds most with the same buckets, by medians;
            None where it adds nothing.
    """

    by_median: float
    by_minimum: float
    ratio: float | None


def added(row: dict[str, Any]) -> list[Added]:
    """Return what each case of a model adds, in the order of ``row["cases"]``."""
    if not row["cases"]:
        return []
    alone = row["alone"]["time"]

    def more(case: dict[str, Any], key: str) -> float:
        return float(case["time"][key] - alone[key])

    most: dict[str, float] = {}
    for case in row["cases"]:
        most[case["buckets"]] = max(most.get(case["buckets"], 0.0), more(case, "median"))
    found = []
    for case in row["cases"]:
        own = more(case, "median")
        ratio = most[case["buckets"]] / own if own > 0 else None
        found.append(Added(own, more(case, "minimum"), ratio))
    return found


def _statistics(timing: Timing) -> dict[str, Any]:
    return {"time": asdict(timing.calls), "rank_medians": timing.rank_medians}


def _measure_model(run: Run, name: str, dtype: str, advance: Callable[[], None]) -> dict[str, Any]:
    shapes = MODELS[name]()
    parameters = sum(map(math.prod, shapes))
    size = parameters * DTYPES[dtype].itemsize
    row: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "tensors": len(shapes),
        "parameters": parameters,
        "size": size,
        "gflop": run.options.gflop,
        "kept": run.options.keep_gradients,
        "left_out": "",
        "cases": [],
    }
    reasons = [reason for reason in run.control.all_gather(_too_large(run, size)) if reason]
    if reasons:
        row["left_out"] = reasons[0]
        return row
    memory = torch.zeros(parameters, dtype=DTYPES[dtype], device=run.device)

    def build() -> EmulatedModel:
        return EmulatedModel(shapes, memory, _own_value(run.rank), run.options.gflop)

    views = {"gradient_as_bucket_view": True} if run.options.keep_gradients else {}
    models: dict[str, nn.Module] = {_ALONE: build()}
    for peer in run.peers:
        for buckets, options in _BUCKETS.items():
            models[f"{peer.name}, {buckets}"] = peer.wrap(build(), **options, **views)
    kept = run.options.keep_gradients
    calls = {label: _Step(model, run.device, kept) for label, model in models.items()}
    means = {  # of which ranks a gradient is the mean
        f"{peer.name}, {buckets}": range(run.world_size)
        if peer.delivers
        else range(run.rank, run.rank + 1)
        for peer in run.peers
        for buckets in _BUCKETS
    }
    wrong = dict.fromkeys(models, 0)

    def verify(times: int) -> None:
        for _ in range(times):
            for label, model in models.items():
                for _ in range(2 if kept else 1):
                    calls[label].call()
                if label != _ALONE and run.options.check:
                    wrong[label] += _count_wrong(model, means[label])
                calls[label].forget()

    verify(max(2, run.options.check))  # at least two: DDP rebuilds its buckets after the first step
    measured = measure_in_quiet(run, calls, False, advance)
    timings = measured.timings
    row |= {"other_processes_percent": measured.others, "attempts": measured.attempts}
    verify(run.options.check)
    wrong_by_rank = run.control.all_gather(wrong)
    row["alone"] = _statistics(timings[_ALONE])
    for peer in run.peers:
        for buckets in _BUCKETS:
            label = f"{peer.name}, {buckets}"
            total = sum(rank[label] for rank in wrong_by_rank) if run.options.check else None
            statistics = _statistics(timings[label])
            row["cases"].append(
                {"backend": peer.name, "buckets": buckets, **statistics, "wrong": total}
            )
    return row


def _lines(row: dict[str, Any]) -> list[str]:
    title = (
        f"# {row['model']}: {row['tensors']} tensors, {row['parameters'] / 1e6:.1f} M parameters, "
        f"{row['size'] / 1e6:.0f} MB of {row['dtype']} gradients"
        f"{', which steps keep and add to' if row['kept'] else ''}"
    )
    if row["left_out"]:
        return [f"{title} is left out: {row['left_out']}"]

    def line(label: str, cells: list[str]) -> str:
        return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>11}" for cell in cells)

    def milliseconds(*microseconds: float) -> list[str]:
        return [f"{value / 1e3:.2f}" for value in microseconds]

    def times(time: dict[str, float]) -> list[str]:
        return milliseconds(time["median"], time["lower"], time["upper"], time["minimum"])

    if row["other_processes_percent"] is not None:
        title += f"; other processes used {row['other_processes_percent']:.0f}% of the machine"
    lines = [title, line("#", list(_TITLES))]
    lines.append(line(_ALONE, times(row["alone"]["time"]) + ["-"] * 4))
    for case, more in zip(row["cases"], added(row), strict=True):
        cells = [
            *times(case["time"]),
            *milliseconds(more.by_median, more.by_minimum),
            "N/A" if case["wrong"] is None else str(case["wrong"]),
            "-" if more.ratio is None else f"{more.ratio:.2f}x",
        ]
        lines.append(line(f"{case['backend']}, {case['buckets']}", cells))
    return lines


def compare_steps(run: Run) -> int:
    """Measures the models and prints a table for each.

    Returns:
        The exit status: 0, 1 if a gradient was wrong, 2 if nothing was measured.
    """
    for peer in [peer for peer in run.peers if peer.group is None or not peer.trains]:
        run.left_out[peer.name] = "DDP needs a process group of torch whose works have results"
        run.peers.remove(peer)
        peer.close()
    run.record["backends"] = [peer.name for peer in run.peers]
    options = run.options
    kinds = [(name, dtype) for name in options.names for dtype in options.dtypes]
    turns = len(kinds) * run.plan.turns * (1 + len(_BUCKETS) * len(run.peers))
    wrong = measured = 0
    run.say(
        *report.heading(run.record, "added: over the step without DDP, by medians; best: by minima")
    )
    with progress_bar("fastcoll.bench ddp", turns, run.rank == 0) as advance:
        for name, dtype in kinds if run.peers else []:
            row = _measure_model(run, name, dtype, advance)
            if run.rank == 0:
                run.record["cases"].append(row)
            run.say("", *_lines(row))
            wrong += sum(case["wrong"] or 0 for case in row["cases"])
            measured += len(row["cases"])
    run.say("", *report.closing(wrong, options.check > 0, measured))
    run.write_json()
    return 1 if wrong else 0 if measured else 2
