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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fastcoll.bench import report
from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.machine import available_memory
from fastcoll.bench.options import DTYPES
from fastcoll.bench.peer import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.quiet import measure_in_quiet
from fastcoll.bench.run import Run
from fastcoll.bench.step_profile import StepProfile, profile_step
from fastcoll.bench.timing import Timing
from fastcoll.bench.turn import Call, TimedCall

__all__ = ["Added", "added", "added_by_profile", "compare_steps"]

_ALONE = "no DDP"
_BUCKETS: dict[str, dict[str, Any]] = {
    "default buckets": {},
    "one bucket": {"bucket_cap_mb": 1 << 20},
}
_LABEL_WIDTH = 36
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


def added_by_profile(row: dict[str, Any], case: dict[str, Any]) -> StepProfile | None:
    """Return what a case of a model does more than the step without DDP; None if that was not profiled."""
    if "profile" not in case:
        return None
    return StepProfile(**case["profile"]).less(StepProfile(**row["alone"]["profile"]))


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

    kept = run.options.keep_gradients
    views = {"gradient_as_bucket_view": True} if kept else {}
    makers: dict[str, Callable[[], nn.Module]] = {_ALONE: build}
    for peer in run.peers:
        for buckets, options in _BUCKETS.items():
            makers[f"{peer.name}, {buckets}"] = partial(_wrapped, peer, build, options | views)
    models: dict[str, nn.Module] = {}
    calls: dict[str, _Step] = {}
    means = {  # of which ranks a gradient is the mean
        f"{peer.name}, {buckets}": range(run.world_size)
        if peer.delivers
        else range(run.rank, run.rank + 1)
        for peer in run.peers
        for buckets in _BUCKETS
    }
    wrong = dict.fromkeys(makers, 0)

    def verify(label: str, times: int) -> None:
        for _ in range(times):
            for _ in range(2 if kept else 1):
                calls[label].call()
            if label != _ALONE and run.options.check:
                wrong[label] += _count_wrong(models[label], means[label])
            calls[label].forget()

    def prepare(label: str) -> None:
        models[label] = makers[label]()
        calls[label] = _Step(models[label], run.device, kept)
        # At least two: DDP rebuilds its buckets after the first step.
        verify(label, max(2, run.options.check))

    prepare(_ALONE)
    for label in [label for label in makers if label != _ALONE]:
        _, problem = run.attempt(partial(prepare, label))
        if problem:  # the others are measured
            row.setdefault("failed", {})[label] = problem
            models.pop(label, None)
            calls.pop(label, None)
    measured = measure_in_quiet(run, calls, False, advance)
    timings = measured.timings
    row |= {"other_processes_percent": measured.others, "attempts": measured.attempts}
    profiles = _profile(run, calls, row) if run.options.profile else {}
    for label in calls:
        verify(label, run.options.check)
    wrong_by_rank = run.control.all_gather(wrong)
    row["alone"] = _statistics(timings[_ALONE]) | profiles.get(_ALONE, {})
    for peer in run.peers:
        for buckets in _BUCKETS:
            label = f"{peer.name}, {buckets}"
            if label not in calls:
                continue
            total = sum(rank[label] for rank in wrong_by_rank) if run.options.check else None
            statistics = _statistics(timings[label]) | profiles.get(label, {})
            row["cases"].append(
                {"backend": peer.name, "buckets": buckets, **statistics, "wrong": total}
            )
    return row


def _wrapped(peer: Peer, build: Callable[[], nn.Module], options: dict[str, Any]) -> nn.Module:
    return peer.wrap(build(), **options)


def _profile(run: Run, calls: dict[str, _Step], row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns by label what rank 0's record has of a step's profile."""
    found: dict[str, StepProfile] = {}
    for label, step in calls.items():
        step.call()  # makes the gradients that a step keeps
        one, problem = run.attempt(
            partial(profile_step, step.call, run.device, run.control.barrier)
        )
        step.forget()
        if one is None or problem:
            row.setdefault("failed", {})[f"{label}, profiler"] = problem
        else:
            found[label] = one
    if _ALONE not in found:
        return {}
    return {label: {"profile": asdict(one)} for label, one in found.items()}


def _line(label: str, cells: list[str]) -> str:
    return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>11}" for cell in cells)


def _profile_lines(row: dict[str, Any]) -> list[str]:
    """Returns a table of what each step does more than the one without DDP, or nothing without ``--profile``."""
    if "profile" not in row["alone"]:
        return []

    def cells(one: StepProfile) -> list[str]:
        return [f"{value:.1f}" for value in asdict(one).values()]

    lines = [
        "# more than without DDP, by torch.profiler, for a step of rank 0; host: until all is queued",
        _line("#", ["host(us)", "launches", "time(us)", "colls", "colls(us)", "calls"]),
        _line(_ALONE, cells(StepProfile(**row["alone"]["profile"]))),
    ]
    lines += [
        _line(f"{case['backend']}, {case['buckets']}", cells(more))
        for case in row["cases"]
        if (more := added_by_profile(row, case))
    ]
    return lines


def _lines(row: dict[str, Any]) -> list[str]:
    title = (
        f"# {row['model']}: {row['tensors']} tensors, {row['parameters'] / 1e6:.1f} M parameters, "
        f"{row['size'] / 1e6:.0f} MB of {row['dtype']} gradients"
        f"{', which steps keep and add to' if row['kept'] else ''}"
    )
    if row["left_out"]:
        return [f"{title} is left out: {row['left_out']}"]

    def milliseconds(*microseconds: float) -> list[str]:
        return [f"{value / 1e3:.2f}" for value in microseconds]

    def times(time: dict[str, float]) -> list[str]:
        return milliseconds(time["median"], time["lower"], time["upper"], time["minimum"])

    if row["other_processes_percent"] is not None:
        title += f"; other processes used {row['other_processes_percent']:.0f}% of the machine"
    lines = [title, _line("#", list(_TITLES))]
    lines.append(_line(_ALONE, times(row["alone"]["time"]) + ["-"] * 4))
    for case, more in zip(row["cases"], added(row), strict=True):
        cells = [
            *times(case["time"]),
            *milliseconds(more.by_median, more.by_minimum),
            "N/A" if case["wrong"] is None else str(case["wrong"]),
            "-" if more.ratio is None else f"{more.ratio:.2f}x",
        ]
        lines.append(_line(f"{case['backend']}, {case['buckets']}", cells))
    failed = [f"# {label} failed: {why}" for label, why in row.get("failed", {}).items()]
    return [*lines, *_profile_lines(row), *failed]


def compare_steps(run: Run) -> int:
    """Measures the models and prints a table for each.

    Returns:
        The exit status: 0, 1 if a gradient was wrong or a way to train failed, 2 if nothing was measured.
    """
    for peer in [peer for peer in run.peers if peer.group is None or not peer.trains]:
        run.left_out[peer.name] = "DDP needs a process group of torch whose works have results"
        run.peers.remove(peer)
        peer.close()
    run.record["backends"] = [peer.name for peer in run.peers]
    options = run.options
    kinds = [(name, dtype) for name in options.names for dtype in options.dtypes]
    turns = len(kinds) * run.plan.turns * (1 + len(_BUCKETS) * len(run.peers))
    wrong = failed = measured = 0
    run.say(
        *report.heading(run.record, "added: over the step without DDP, by medians; best: by minima")
    )
    with progress_bar("fastcoll.bench ddp", turns, run.rank == 0) as advance:
        for name, dtype in kinds if run.peers else []:
            row = _measure_model(run, name, dtype, advance)
            if run.rank == 0:
                run.record["cases"].append(row)
            run.write_json()  # what there is, lest a later model cost it
            run.say("", *_lines(row))
            wrong += sum(case["wrong"] or 0 for case in row["cases"])
            failed += len(row.get("failed", {}))
            measured += len(row["cases"])
    run.say("", *report.closing(wrong, options.check > 0, measured))
    run.write_json()
    return 1 if wrong or failed else 0 if measured else 2
