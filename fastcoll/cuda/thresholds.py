"""Where all-reduce algorithms on devices give way to each other.

By itself, as every group reads the tuning table, also those that never see a device.

What no table has measured is estimated: the alpha-beta models of the kernels (``fastcoll.costs``), beside NCCL's own
model of its best algorithm. A step of a kernel is taken for one of NCCL's Simple protocol, which also stores, fences,
sets a flag and reads what is behind it. NCCL's model says 15 us of 8 KiB on 8 GPUs, where H100 measured 22, and
torch's one-shot kernel 10.8 (github.com/yifuwang/symm-mem-recipes, issue 3): the difference is added to each call of
NCCL. A kernel's programs have the memory bandwidth of as many multiprocessors, by which they copy the message to
where peers read it, and reduce. So a limit is good to a factor of two at best, and a table that ``python -m
fastcoll.tune --device cuda`` has measured takes its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import torch

__all__ = ["DEFAULT", "Thresholds", "device_name", "estimate"]

_SIZES = tuple(1 << power for power in range(10, 31))
_LIBRARY_CALL = 6.9e-6
_PROGRAMS = 32  # of a launch: ROOM.channels of fastcoll/cuda/symmetric.py
_MULTIPROCESSORS = 132  # of H200; a B200 has 148


@dataclass(frozen=True)
class Thresholds:
    """Where one algorithm gives way to the next: the section of the tuning table that is about devices.

    The defaults are what :func:`estimate` says of 8 ranks of H100 or H200.

    Attributes:
        one_shot_bytes: Largest message, as it travels, that one_shot takes. In bytes, as all but `list_tensors`.
        two_shot_bytes: Largest that two_shot takes; beyond come ring and NCCL.
        ring_bytes: Largest that ring takes.
        list_tensors: Least number of tensors reduced together that are fused into a bucket.
        list_bytes: Largest mean size of such tensors.
    """

    one_shot_bytes: int = 64 << 10
    two_shot_bytes: int = 2 << 20
    ring_bytes: int = 0
    list_tensors: int = 4
    list_bytes: int = 1 << 20

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the fields."""
        return tuple(field.name for field in fields(cls))


DEFAULT = Thresholds()
"""The limits of 8 ranks, for who knows neither ranks nor device; and those of lists for all."""


@functools.cache
def estimate(device: str, ranks: int) -> Thresholds:
    """Returns limits for devices that no table has measured, by the cost models: powers of two.

    Args:
        device: Its name. B100, B200, B300 are taken for B200, all others for H200.
        ranks: Of the group, as if all were behind one NVSwitch.
    """
    if ranks < 2:
        return DEFAULT
    from fastcoll.costs import ALGORITHMS, HGX_B200, HGX_H200, nccl

    blackwell = any(name in device for name in ("B100", "B200", "B300"))
    platform, generation = (HGX_B200, nccl.BLACKWELL) if blackwell else (HGX_H200, nccl.HOPPER)
    memory = platform.memory_bandwidth * _PROGRAMS / _MULTIPROCESSORS  # bytes a second
    machine = replace(
        platform.machine("Simple"), per_node=ranks, reduce_seconds_per_byte=3 / memory
    )

    def seconds(kernel: str, size: int) -> float:
        cost = ALGORITHMS["all_reduce"][kernel].cost(ranks, size, machine)
        return float(cost.seconds(machine)) + 2 * size / memory

    def library(size: int) -> float:
        found = nccl.predict("all_reduce", ranks, size, ranks, generation)
        return _LIBRARY_CALL + min(prediction.seconds for prediction in found)

    def kernels(size: int) -> float:
        return min(seconds("one_shot", size), seconds("two_shot", size))

    two_shot = max((size for size in _SIZES if kernels(size) <= library(size)), default=0)
    one_shot = max(
        (
            size
            for size in _SIZES
            if size <= two_shot and seconds("one_shot", size) <= seconds("two_shot", size)
        ),
        default=0,
    )
    return Thresholds(one_shot, two_shot)


def device_name(device: torch.device) -> str:
    """Returns the name of a device, for which a section of a table counts."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
