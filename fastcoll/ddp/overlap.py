"""What the ranks of a group agree on once: how their gradients are to travel.

Beside the backward pass, or after it where they would only take the cores that it runs on; and bucket by bucket where
those lie in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import cpu_backend

__all__ = ["are_shared", "can_overlap", "leave_a_core", "makes_shared"]


def can_overlap(group: ProcessGroup | None, device: torch.device) -> bool:
    """Tells whether gradients are to be reduced while the backward pass goes on, rather than at its end.

    Not on the CPU where all ranks are on one host and compute with as many threads as it has cores for them. There a
    bucket that is reduced meanwhile takes turns with the pass that it was to overlap, and each rank's turns hold up the
    others. Between hosts a core mostly waits.

    All ranks of the group call it, and get the same answer.

    Args:
        group: None is the default group.
        device: Of the gradients.
    """
    backend = cpu_backend(group or dist.group.WORLD, device)
    if backend is None:
        return True
    mine = (torch.get_num_threads(), os.sched_getaffinity(0))
    ranks: list[tuple[int, set[int]]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    # Known for sure only now that the ranks have met.
    return backend.transport() == "gloo" or leave_a_core(ranks)


def are_shared(group: ProcessGroup | None, buffer: Tensor) -> bool:
    """Tells whether every rank's buffer lies in memory that the ranks share; all call it, and get the same answer.

    Such a message is reduced where it lies, at the cost of one pass over it, if it comes alone and as it is.

    Args:
        group: None is the default group.
        buffer: This rank's.
    """
    backend = cpu_backend(group or dist.group.WORLD, buffer.device)
    if backend is None:
        return False
    ranks = [False] * dist.get_world_size(group)
    dist.all_gather_object(ranks, backend.is_shared(buffer), group=group)
    # Of two hosts each rank's lies in shared memory, but not the others'. Known now that the ranks have met.
    return all(ranks) and backend.transport() == "shm"


def makes_shared(group: ProcessGroup | None, device: torch.device) -> bool:
    """Tells whether tensors that are made on a device, as gradients are, lie in memory that the ranks share.

    All ranks of the group call it, and get the same answer.

    Args:
        group: None is the default group.
        device: Of the gradients.
    """
    return device.type == "cpu" and are_shared(
        group, torch.empty(1 << 16, dtype=torch.uint8, device=device)
    )


def leave_a_core(ranks: Sequence[tuple[int, set[int]]]) -> bool:
    """Tells whether ranks of one host leave one of their cores free.

    Args:
        ranks: The threads that each computes with, and the cores that it may use.
    """
    cores: set[int] = set().union(*(allowed for _, allowed in ranks))
    return sum(threads for threads, _ in ranks) < len(cores)
