"""The half of ``python -m fastcoll.tune`` that measures on devices: which algorithm for which size, what to fuse.

    torchrun --nproc-per-node 8 -m fastcoll.tune --device cuda       as many ranks as the runs to come

Every algorithm that can serve a call is timed at every size, in turns; then lists of tensors, fused and not. The
table's section on devices holds the limits for which the product of all times is the least.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.bench.control import Control
from fastcoll.bench.timing import Plan, measure
from fastcoll.bench.turn import TimedCall
from fastcoll.cuda.algorithms import ALGORITHMS, Call
from fastcoll.cuda.engine import engine_of
from fastcoll.cuda.thresholds import DEFAULT, Thresholds, device_name

__all__ = ["COUNTS", "LIST_SIZES", "SIZES", "limits", "list_limits", "measure_device"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB << step for step in range(16))
"""Message sizes: 4 KiB to 128 MiB."""

COUNTS = (2, 4, 8, 16, 64)
"""Tensors of a list, each as large as the first of LIST_SIZES."""

LIST_SIZES = tuple(size * KIB for size in (16, 64, 256, 1024, 4096))
"""Sizes of each of 16 tensors."""

_OF_A_LIST = 16
_ORDER = ("one_shot", "two_shot", "ring", "nccl")

Times = Mapping[int, Mapping[str, float]]
"""Median microseconds by size or count, and by name; a name may be missing."""


def limits(times: Times) -> tuple[int, int, int]:
    """Returns up to which sizes one_shot, two_shot and ring are used, and beyond them NCCL.

    Those limits for which the product of the times over all sizes is the least; the least such limits.

    Args:
        times: By message size, and by algorithm.
    """
    sizes = sorted(times)

    def cost(bounds: tuple[int, ...]) -> float:
        total = 0.0
        for size in sizes:
            name = next(
                (n for n, most in zip(_ORDER, bounds, strict=False) if size <= most), "nccl"
            )
            total += math.log(times[size].get(name, math.inf))
        return total

    choices = itertools.combinations_with_replacement([0, *sizes], 3)
    first, second, third = min(choices, key=cost)
    # A limit that the one before has reached serves nothing: 0 says so.
    return first, second if second > first else 0, third if third > max(first, second) else 0


def list_limits(counts: Times, sizes: Times) -> tuple[int, int]:
    """Returns from how many tensors on, and up to which mean size, lists are fused.

    Args:
        counts: By the number of small tensors, "fused" and "apart".
        sizes: By the size of each of 16 tensors, the same.
    """

    def cost(times: Times, fused: Callable[[int], bool]) -> float:
        return sum(math.log(times[each]["fused" if fused(each) else "apart"]) for each in times)

    never = 1 << 30
    least = min([*sorted(counts), never], key=lambda n: cost(counts, lambda each: each >= n))
    most = min([0, *sorted(sizes)], key=lambda n: cost(sizes, lambda each: each <= n))
    return least, most


def measure_device(
    control: Control,
    plan: Plan,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    counts: Sequence[int] = COUNTS,
    list_sizes: Sequence[int] = LIST_SIZES,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measures on the default group; all ranks call it.

    Args:
        control: Of all ranks.
        plan: How many calls.
        device: This rank's.
        sizes: Of messages, in bytes.
        counts: Of tensors in a list.
        list_sizes: Of each of 16 tensors, in bytes.
        advance: Called after each turn.

    Returns:
        The section of the table: the name of the device, ranks, why ranks map no memory of each other if they do not,
        the table, what was measured.
    """
    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(1, device=device))  # makes communicator and region
    engine = engine_of(group.group_name)
    assert engine is not None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    topology = engine.all_reduces[index].region.topology

    def run(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        timed = {name: TimedCall(call, device) for name, call in calls.items()}
        timings = measure(timed, control, plan, True, advance)
        return {name: timing.calls.median for name, timing in timings.items()}

    by_size: dict[int, dict[str, float]] = {}
    for size in sizes:
        tensor = torch.zeros(size // 4, device=device)
        what = Call(torch.float32, "SUM", (tensor.numel(),))
        able = [name for name in _ORDER if not ALGORITHMS[name].refusal(what, topology)]
        by_size[size] = run({name: partial(_one, tensor, name) for name in able})
    by_count: dict[int, dict[str, float]] = {}
    by_list_size: dict[int, dict[str, float]] = {}
    if topology.kernels:
        for count in counts:
            by_count[count] = run(_lists(count, list_sizes[0], device))
        for size in list_sizes:
            by_list_size[size] = run(_lists(_OF_A_LIST, size, device))
    one_shot, two_shot, ring = limits(by_size)
    table = Thresholds(one_shot, two_shot, ring, DEFAULT.list_tensors, DEFAULT.list_bytes)
    if topology.kernels:
        table = Thresholds(one_shot, two_shot, ring, *list_limits(by_count, by_list_size))
    return {
        "name": device_name(device),
        "ranks": topology.ranks,
        "without peers": topology.reason,
        "table": asdict(table),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "unit": "median microseconds of the slowest rank",
        "measured": {"sizes": by_size, "list_tensors": by_count, "list_bytes": by_list_size},
    }


def _one(tensor: torch.Tensor, algorithm: str) -> None:
    _backend(tensor).all_reduce_list([tensor], dist.ReduceOp.SUM, algorithm=algorithm)


def _many(tensors: list[torch.Tensor], fuse: bool) -> None:
    _backend(tensors[0]).all_reduce_list(tensors, dist.ReduceOp.SUM, fuse=fuse)


def _backend(tensor: torch.Tensor) -> Any:
    """Returns the default group's for a tensor."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(tensor.device)


def _lists(count: int, size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    tensors = [torch.zeros(size // 4, device=device) for _ in range(count)]
    return {"fused": partial(_many, tensors, True), "apart": partial(_many, tensors, False)}
