"""The part of ``fastcoll tune`` for devices: which algorithm serves which size, and which lists to fuse.

    torchrun --nproc-per-node 8 -m fastcoll.tune --device cuda       as many ranks as later runs have

At every size, all algorithms that can serve the call take turns. Then lists of tensors take turns, fused and not. The
device section of the table holds the limits with the least product of all times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._measure import Call, Control, Plan
from fastcoll.cuda import algorithms
from fastcoll.cuda.engine import engine_of
from fastcoll.cuda.thresholds import DEFAULT, Thresholds, device_name
from fastcoll.tune_search import from_where, limits, median_times, show

__all__ = ["measure_device"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB << step for step in range(16))  # of messages: 4 KiB to 128 MiB
COUNTS = (2, 4, 8, 16, 64)  # tensors of a list, each as large as the first of LIST_SIZES
LIST_SIZES = tuple(size * KIB for size in (16, 64, 256, 1024, 4096))  # of each of 16 tensors
_OF_A_LIST = 16
_ORDER = ("one_shot", "two_shot", "ring", "nccl")


def measure_device(
    control: Control,
    plan: Plan,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    counts: Sequence[int] = COUNTS,
    list_sizes: Sequence[int] = LIST_SIZES,
) -> dict[str, Any]:
    """Measures on the default group; all ranks call it.

    Args:
        control: Control of the run.
        plan: Number of calls.
        device: Device of this rank.
        sizes: Message sizes, in bytes.
        counts: Numbers of tensors in a list.
        list_sizes: Sizes of each of 16 tensors, in bytes.

    Returns:
        The device section of the table: device name, number of ranks, the reason if ranks do not map each other's
        memory, the table, and the measurements.
    """
    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(1, device=device))  # makes communicator and region
    engine = engine_of(group.group_name)
    assert engine is not None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    engine.all_reduces[index].has_kernels()
    topology = engine.all_reduces[index].region.topology
    backend: Any = group._get_backend(device)
    reduce = partial(backend.all_reduce_list, op=dist.ReduceOp.SUM)
    run = partial(median_times, control=control, plan=plan, device=device)

    def alone(size: int) -> Mapping[str, Call]:
        tensor = torch.zeros(size // 4, device=device)
        what = algorithms.Call(torch.float32, "SUM", (tensor.numel(),))
        able = [n for n in _ORDER if not algorithms.ALGORITHMS[n].refusal(what, topology)]
        return {name: partial(reduce, [tensor], algorithm=name) for name in able}

    def listed(count: int, size: int) -> Mapping[str, Call]:
        tensors = [torch.zeros(size // 4, device=device) for _ in range(count)]
        ways = {"fused": True, "apart": False}
        return {name: partial(reduce, tensors, fuse=fuse) for name, fuse in ways.items()}

    measured = {"sizes": run(sizes, alone), "list_tensors": {}, "list_bytes": {}}
    bounds = [*limits(measured["sizes"], _ORDER), DEFAULT.list_tensors, DEFAULT.list_bytes]
    if topology.kernels:
        by_count = run(counts, lambda count: listed(count, list_sizes[0]))
        by_size = run(list_sizes, lambda size: listed(_OF_A_LIST, size))
        measured |= {"list_tensors": by_count, "list_bytes": by_size}
        bounds[3:] = [
            from_where(by_count, ("apart", "fused")),
            *limits(by_size, ("fused", "apart")),
        ]
    table = asdict(Thresholds(*bounds))
    for name, value in table.items():
        show(control, name, value)
    return {
        "name": device_name(device),
        "ranks": topology.ranks,
        "without peers": topology.reason,
        "table": table,
        "unit": "median microseconds of the slowest rank",
        "measured": measured,
    }
