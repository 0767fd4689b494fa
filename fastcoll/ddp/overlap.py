"""How gradients travel, agreed on once by the ranks of a group.

They travel during the backward pass, or after it if the reduction would only take cores from the pass. Buckets in
shared memory travel one by one.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import cpu_backend, this_host

__all__ = ["are_shared", "can_overlap", "leave_a_core", "makes_shared"]


def can_overlap(group: ProcessGroup | None, device: torch.device) -> bool:
    """Returns whether gradients are reduced during the backward pass, rather than at its end.

    False on the CPU if the ranks of a host compute with as many threads as they have cores, unless each rank is alone
    on its host. Inside a host a reduction would take turns with the pass that it should overlap, and each rank's turns
    would delay the others. Between hosts a core mostly waits.

    All ranks of the group call this, and get the same result.
    """
    backend = cpu_backend(group or dist.group.WORLD, device)
    if backend is None:
        return True
    mine = (this_host(), torch.get_num_threads(), os.sched_getaffinity(0))
    ranks: list[tuple[str, int, set[int]]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    # The transport is known only after this first collective.
    shares_memory = backend.transport().startswith(("shm", "local"))
    return not shares_memory or leave_a_core(ranks)


def are_shared(group: ProcessGroup | None, buffer: Tensor) -> bool:
    """Returns whether the buffers of all ranks are in shared memory; all ranks call this, and get the same result.

    Such a message is reduced in place if it is one buffer and needs no cast. This costs one pass over it.
    """
    backend = cpu_backend(group or dist.group.WORLD, buffer.device)
    if backend is None:
        return False
    ranks = [False] * dist.get_world_size(group)
    dist.all_gather_object(ranks, backend.is_shared(buffer), group=group)
    # On two hosts each buffer is in shared memory, but not of all ranks. The transport is known after the collective.
    return all(ranks) and backend.transport() == "shm"


def makes_shared(group: ProcessGroup | None, device: torch.device) -> bool:
    """Returns whether new tensors on a device, such as gradients, are in memory that the ranks share.

    All ranks of the group call this, and get the same result.
    """
    return device.type == "cpu" and are_shared(
        group, torch.empty(1 << 16, dtype=torch.uint8, device=device)
    )


def leave_a_core(ranks: Sequence[tuple[str, int, set[int]]]) -> bool:
    """Returns whether on every host the ranks leave a core free; `ranks`: host, compute threads and allowed cores."""
    threads: Counter[str] = Counter()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for host, used, allowed in ranks:
        threads[host] += used
        cores[host] |= allowed
    return all(threads[host] < len(cores[host]) for host in cores)
