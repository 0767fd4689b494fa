"""``python -m fastcoll.bench.parity``: the same training with gloo and with fastcoll's hook, step by step.

For each task, in one run: stock DDP on gloo; fastcoll's hook and its GradientSynchronizer in float32; the hook with a
bfloat16 wire; and stock DDP on gloo again, with other orders of the data. In float32 every loss must be the same, bit
for bit. So it is on two ranks: a sum of two has one order, and halves are exact. On more ranks gloo sums in another
order.

What a bfloat16 wire may change is measured, not chosen: the *noise* is the standard deviation that the order of the
data alone makes in the loss on a fixed held-out set, on gloo. Over the run the wire must move that loss by less, on
average.

Exit status: 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastcoll.bench import parity_plot, plot
from fastcoll.bench.launch import launch
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.parity_models import TASKS, Task
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

__all__ = ["Course", "compare", "hooked", "judge", "main", "stock", "synchronized", "train"]

_MODULE = "fastcoll.bench.parity"
_BUCKET_MB = 0.1
_HELD_OUT = 96
_POINTS = 15  # of a run, at which the held-out loss is taken


@dataclass(frozen=True)
class Course:
    """What a rank saw of a training.

    Attributes:
        losses: Of this rank's batches, a number a step.
        held_out: Loss on the held-out set, at equally many places of the run.
        weights: All parameters at the end, in one vector.
    """

    losses: list[float]
    held_out: list[float]
    weights: Tensor


Wrap = Callable[[nn.Module], nn.Module]
"""Makes a model train in data parallel; returns what is called for its outputs."""


def stock(group: dist.ProcessGroup | None) -> Wrap:
    """Returns DistributedDataParallel."""
    return lambda model: _ddp(model, group)


def hooked(group: dist.ProcessGroup | None, wire_dtype: torch.dtype | None = None) -> Wrap:
    """Returns DistributedDataParallel with fastcoll's hook."""

    def wrap(model: nn.Module) -> nn.Module:
        ddp = _ddp(model, group)
        ddp.register_comm_hook(
            FusedAllreduceState(group, wire_dtype=wire_dtype), fused_allreduce_hook
        )
        return ddp

    return wrap


def synchronized(group: dist.ProcessGroup | None) -> Wrap:
    """Returns fastcoll's GradientSynchronizer."""

    def wrap(model: nn.Module) -> nn.Module:
        GradientSynchronizer(model, group, bucket_cap_mb=_BUCKET_MB)
        return model

    return wrap


def _ddp(model: nn.Module, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=_BUCKET_MB)


def train(task: Task, steps: int, wrap: Wrap, order: int = 0) -> Course:
    """Trains on this rank's data; all ranks call it.

    Args:
        task: What to learn.
        steps: How many.
        wrap: How gradients are averaged.
        order: Seed of the data's order; the model's start is always the same.
    """
    torch.manual_seed(0)
    model = task.build()
    ddp = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9)
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(1000 + 100 * order + rank)
    fixed = task.sample(_HELD_OUT, torch.Generator().manual_seed(999))
    losses, held_out = [], []
    for step in range(steps):
        inputs, labels = task.sample(task.batch, data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) * _POINTS // steps > step * _POINTS // steps:
            held_out.append(_loss_on(model, fixed))
    weights = torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])
    return Course(losses, held_out, weights)


def _loss_on(model: nn.Module, fixed: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(fixed[0]), fixed[1]).item()
    model.train()
    return loss


def compare(
    task: Task, steps: int, orders: int, gloo: dist.ProcessGroup, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Trains in all ways; all ranks call it.

    Args:
        task: What to learn.
        steps: Of each training.
        orders: Trainings on the stock backend, each with another order of the data; 3 or more.
        gloo: Group of the stock backend.
        group: Of fastcoll; None is the default group.

    Returns:
        This rank's view: losses and held-out losses of each training, ``same``: whether float32 is, bit for
        bit, ``noise`` and ``moved``, see the head of this file.

    Raises:
        ValueError: Fewer than 3 orders.
    """
    if orders < 3:
        raise ValueError(
            f"{_MODULE}: expected 3 orders of the data or more to know a spread, got {orders}"
        )
    by_stock = [train(task, steps, stock(gloo), order) for order in range(orders)]
    same = train(task, steps, hooked(group))
    direct = train(task, steps, synchronized(group))
    narrow = train(task, steps, hooked(group, torch.bfloat16))
    points = list(zip(*(course.held_out for course in by_stock), strict=True))
    first = by_stock[0]
    return {
        "losses": {"gloo": first.losses, "float32": same.losses, "bfloat16 wire": narrow.losses},
        "held_out": {
            "gloo": [course.held_out for course in by_stock],
            "float32": same.held_out,
            "bfloat16 wire": narrow.held_out,
        },
        "same": {"fused hook": _same(same, first), "GradientSynchronizer": _same(direct, first)},
        "other_weights": not torch.equal(narrow.weights, first.weights),
        "noise": statistics.mean(map(statistics.stdev, points)),
        "moved": statistics.mean(
            abs(a - b) for a, b in zip(narrow.held_out, first.held_out, strict=True)
        ),
    }


def _same(one: Course, other: Course) -> bool:
    """Tells whether two trainings are the same, bit for bit."""
    return (
        one.losses == other.losses
        and one.held_out == other.held_out
        and torch.equal(one.weights, other.weights)
    )


def judge(name: str, case: dict[str, Any]) -> list[str]:
    """Returns what does not hold of a rank's view; see the head of this file."""
    problems = [
        f"{name}: in float32 the training with the {way} is not gloo's, bit for bit"
        for way, same in case["same"].items()
        if not same
    ]
    if not case["other_weights"]:
        problems.append(f"{name}: the bfloat16 wire changed nothing: it was not used")
    if not case["moved"] < case["noise"]:
        problems.append(
            f"{name}: the bfloat16 wire moves the held-out loss by {case['moved']:.2e}, the order of the data by "
            f"{case['noise']:.2e}"
        )
    losses = case["losses"]["gloo"]
    tenth = max(1, len(losses) // 10)
    if not statistics.mean(losses[-tenth:]) < 0.9 * statistics.mean(losses[:tenth]):
        problems.append(f"{name}: nothing was learnt, so that nothing is compared")
    return problems


def _run_rank(options: argparse.Namespace, given: list[str]) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("fastcoll")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    cases: dict[str, Any] = {}
    problems: list[str] = []
    for name in options.tasks:
        case = compare(TASKS[name], options.steps, options.orders, gloo, None)
        problems += judge(name, case)
        views: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(views, problems)
        problems = list(dict.fromkeys(problem for view in views for problem in view))
        cases[name] = {"parameters": _parameters(TASKS[name]), **case}
        if dist.get_rank() == 0:
            print(
                f"{name}: {options.steps} steps, {options.nproc} ranks: float32 "
                f"{'the same bit for bit' if all(case['same'].values()) else 'DIFFERENT'}; held-out loss moved by the "
                f"bfloat16 wire {case['moved']:.5f}, by the order of the data {case['noise']:.5f}",
                flush=True,
            )
    if dist.get_rank() == 0:
        record = {
            **describe_run(given),
            "command": " ".join(["python", "-m", _MODULE, *given]),
            "machine": describe_machine(torch.device("cpu")),
            "world_size": dist.get_world_size(),
            "steps": options.steps,
            "orders": options.orders,
            "unit": "cross entropy of rank 0's batches; noise and moved: of the held-out loss, means over the run",
            "problems": problems,
            "tasks": cases,
        }
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        if options.plot:
            parity_plot.draw(record, options.plot)
        for problem in problems:
            print(f"{_MODULE}: {problem}", file=sys.stderr)
    gc.collect()
    dist.destroy_process_group()
    return 1 if problems else 0


def _parameters(task: Task) -> int:
    return sum(weight.numel() for weight in task.build().parameters())


def main(arguments: Sequence[str] | None = None) -> int:
    """Is one rank where RANK is set, and else starts ``--nproc`` of them; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--nproc", type=int, default=2, choices=(1, 2), help="ranks (%(default)s)")
    parser.add_argument("--orders", type=int, default=5, help="of the data, on gloo (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--json", type=Path, help="write losses and verdict")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.steps < _POINTS or options.orders < 3:
        parser.error(f"--steps: expected {_POINTS} or more; --orders: 3 or more")
    if options.plot and (problem := plot.missing()):
        parser.error(problem)
    if "RANK" in os.environ:
        return _run_rank(options, given)
    return launch([sys.executable, "-m", _MODULE, *given], options.nproc)


if __name__ == "__main__":
    sys.exit(main())
