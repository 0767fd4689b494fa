"""``fastcoll.monitored_barrier``: a barrier that names the ranks which have not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastcoll._group_backend import needed_cpu_backend

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits for all ranks of a group, as ``dist.monitored_barrier`` does, which torch keeps to the name "gloo".

    Args:
        group: One of fastcoll's for CPU tensors; None is the default group.
        timeout: None is the group's.
        wait_all_ranks: Name all ranks that have not come, not the first alone.

    Raises:
        ValueError: The group's CPU tensors are not fastcoll's.
        dist.DistBackendError: A rank has not come in time; says which.
    """
    given: Any = group  # torch has a number for ranks that are in no group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        return
    instead = "dist.monitored_barrier for a group of gloo"
    backend = needed_cpu_backend(group, "monitored_barrier", instead)
    backend.monitored_barrier(timeout or backend.options.timeout, wait_all_ranks)
