"""The time that DistributedDataParallel adds to a training step: a step with DDP minus the same step without it.

Forward and backward are emulated, so nearly all of the difference is communication and the copies around it. For
each backend stock DDP is measured in two ways. With its default buckets communication may overlap the backward
pass. With one bucket for all gradients it can only follow the pass.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from fastcoll._measure import Call, take_turn
from fastcoll.bench import report
from fastcoll.bench.conditions import available_memory
from fastcoll.bench.derived import StepProfile, added, added_by_profile
from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import Candidate, Run
from fastcoll.bench.step_profile import profile_step
from fastcoll.bench.table import Column, Table, times_text

__all__ = ["compare_steps"]

_ALONE = "no DDP"
_BUCKETS: dict[str, dict[str, Any]] = {
    "default buckets": {},
    "one bucket": {"bucket_cap_mb": 1 << 20},
}
_LABEL = Column("#", -36)
_TIMES = ("step(ms)", "q1", "q3", "min", "added(ms)", "best", "#wrong", "ratio")
_PROFILE = ("host(us)", "launches", "time(us)", "colls", "colls(us)", "calls")


class _Step:
    """A training step. Its gradients are freed at the end of a turn, so only one model has gradients at a time.

    Args:
        model: Returns the loss when called.
        run: The run.
        ranks: Ranks whose mean a gradient must be.
    """

    def __init__(self, model: nn.Module, run: Run, ranks: range) -> None:
        self._model = model
        self._options = run.options
        self._device = run.device
        self._ranks = ranks
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            with self._gradients():
                self.take()

    def take(self) -> None:
        """Zeroes the last step's gradients and adds to them, or makes new ones."""
        self._model.zero_grad(set_to_none=not self._options.keep_gradients)
        self._model().backward()

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Makes the gradients that a step keeps, and frees all gradients at the end."""
        try:
            if self._options.keep_gradients:
                self.take()
            yield
        finally:
            self._model.zero_grad(set_to_none=True)

    def verify(self) -> int:
        """Takes steps with new gradients, and returns the number of elements that are not the mean."""
        wrong = 0
        for _ in range(self._options.check):
            with self._gradients():
                self.take()
                wrong += _count_wrong(self._model, self._ranks)
        return wrong

    def turn(self, meet: Call, warmup: int, calls: int) -> list[float]:
        """Takes a turn."""
        with self._gradients():
            return take_turn(self.take, self._device, meet, warmup, calls)

    def profile(self, meet: Call) -> StepProfile:
        """Profiles the step; all ranks call this."""
        with self._gradients():
            return profile_step(self.take, self._device, meet)


def _own_value(rank: int) -> float:
    return 3.0 if rank % 2 else 1.0


def _count_wrong(model: nn.Module, ranks: range) -> int:
    """Returns the number of gradient elements that are not the mean over these ranks."""
    mean = sum(map(_own_value, ranks)) / len(ranks)
    wrong = 0
    for weight in model.parameters():
        allowed = 0.0 if len(ranks) <= 2 else len(ranks) * torch.finfo(weight.dtype).eps * mean
        gradient = torch.full_like(weight, math.nan) if weight.grad is None else weight.grad
        wrong += int((~((gradient - mean).abs() <= allowed)).sum())
    return wrong


def _too_large(run: Run, size: int) -> str:
    """Returns the reason if a model does not fit into the memory of this host, or ""."""
    if run.device.type != "cpu":
        return ""
    # All models share the parameters, and have gradients in turn. Each DDP has its own buckets.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size))
    needed = size * (2 + len(_BUCKETS) * len(run.peers)) * ranks
    available = available_memory()
    if needed <= 0.9 * available:
        return ""
    return (
        f"it takes {needed / 2**30:.0f} GiB of the {available / 2**30:.0f} GiB that are free: "
        "name fewer backends, or halve it with -d bfloat16"
    )


def _measure_model(run: Run, name: str, dtype: str, advance: Call) -> dict[str, Any]:
    shapes, kept = MODELS[name](), run.options.keep_gradients
    parameters = sum(map(math.prod, shapes))
    kind: torch.dtype = getattr(torch, dtype)
    size = parameters * kind.itemsize
    row: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "tensors": len(shapes),
        "parameters": parameters,
        "size": size,
        "gflop": run.options.gflop,
        "kept": kept,
        "left_out": next(filter(None, run.control.all_gather(_too_large(run, size))), ""),
        "cases": [],
    }
    if row["left_out"]:
        return row
    memory = torch.zeros(parameters, dtype=kind, device=run.device)
    views = {"gradient_as_bucket_view": True} if kept else {}
    steps: dict[str, _Step] = {}

    def prepare(label: str, peer: Peer | None = None, buckets: str = "") -> Candidate:
        model: nn.Module = EmulatedModel(shapes, memory, _own_value(run.rank), run.options.gflop)
        ranks = range(run.rank, run.rank + 1)
        if peer:
            model = peer.wrap(model, **_BUCKETS[buckets], **views)
            ranks = range(run.world_size) if peer.delivers else ranks
        steps[label] = step = _Step(model, run, ranks)
        return Candidate(step.turn, step.verify if run.options.check else None)

    labels = {
        f"{peer.name}, {buckets}": (peer, buckets) for peer, buckets in product(run.peers, _BUCKETS)
    }
    makers = {label: partial(prepare, label, *names) for label, names in labels.items()}
    beside = {_ALONE: prepare(_ALONE).turn}
    found, failed, disturbed = run.compare(makers, beside, False, advance)
    for label in found if run.options.profile else ():
        profile, problem = run.attempt(partial(steps[label].profile, run.control.barrier))
        if profile is None or problem:
            failed[f"{label}, profiler"] = problem
        elif "profile" in found[_ALONE] or label == _ALONE:
            found[label]["profile"] = profile._asdict()
    alone = found.pop(_ALONE)
    for label, times in found.items():
        peer, buckets = labels[label]
        row["cases"].append({"backend": peer.name, "buckets": buckets, **times})
    return {**row, **disturbed, "alone": alone, **({"failed": failed} if failed else {})}


def _profile_lines(row: dict[str, Any]) -> list[str]:
    """Returns a table of each step's profile minus that without DDP; empty without ``--profile``."""
    if "profile" not in row["alone"]:
        return []
    table = Table(_LABEL, *(Column(title, 10, 1) for title in _PROFILE))
    found = {_ALONE: StepProfile(**row["alone"]["profile"])}
    for case in row["cases"]:
        if more := added_by_profile(row, case):
            found[f"{case['backend']}, {case['buckets']}"] = more
    return [
        "# more than without DDP, by torch.profiler, for a step of rank 0; host: until all is queued",
        *table.head(),
        *(table.row([label, *more]) for label, more in found.items()),
    ]


def _lines(row: dict[str, Any]) -> list[str]:
    title = (
        f"# {row['model']}: {row['tensors']} tensors, {row['parameters'] / 1e6:.1f} M parameters, "
        f"{row['size'] / 1e6:.0f} MB of {row['dtype']} gradients"
        f"{', which steps keep and add to' if row['kept'] else ''}"
    )
    if row["left_out"]:
        return [f"{title} is left out: {row['left_out']}"]
    if row["other_processes_percent"] is not None:
        title += f"; other processes used {row['other_processes_percent']:.0f}% of the machine"
    table = Table(_LABEL, *(Column(title, 10) for title in _TIMES))

    def milliseconds(time: Mapping[str, float]) -> list[float]:
        return [time[key] / 1e3 for key in ("median", "lower", "upper", "minimum")]

    lines = [title, *table.head()]
    lines.append(table.row([_ALONE, *milliseconds(row["alone"]["time"]), *[None] * 4]))
    for case, more in added(row):
        times = [*milliseconds(case["time"]), more.by_median / 1e3, more.by_minimum / 1e3]
        wrong = "N/A" if case["wrong"] is None else case["wrong"]
        label = f"{case['backend']}, {case['buckets']}"
        lines.append(table.row([label, *times, wrong, times_text(more.ratio)]))
    failed = [f"# {label} failed: {why}" for label, why in row.get("failed", {}).items()]
    return [*lines, *_profile_lines(row), *failed]


def compare_steps(run: Run) -> int:
    """Measures the models and prints a table for each.

    Returns:
        The exit status: 0, 1 if a gradient was wrong or a way to train failed, 2 if nothing was measured.
    """
    for peer in [peer for peer in run.peers if not peer.trains]:
        problem = "DDP needs a process group of torch whose works have results"
        run.leave_out(peer.name, problem, peer)
        run.peers.remove(peer)
    run.record["backends"] = [peer.name for peer in run.peers]
    options = run.options
    kinds = list(product(options.names, options.dtypes))
    turns = len(kinds) * run.plan.turns * (1 + len(_BUCKETS) * len(run.peers))
    failed = False
    legend = "added: over the step without DDP, by medians; best: by minima"
    run.say(*report.heading(run.record, legend))
    with run.progress(turns) as advance:
        for name, dtype in kinds if run.peers else []:
            row = _measure_model(run, name, dtype, advance)
            run.add(row, row["cases"], ["", *_lines(row)])
            failed |= "failed" in row
    return run.finish(failed=failed)
