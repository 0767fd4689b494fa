"""``fastcoll.monitored_barrier``: a barrier that names the ranks that have not arrived."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import ProcessGroup

from fastcoll._group_backend import is_outside, needed_cpu_backend

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits for all ranks of a group, and names the ranks that are late.

    torch allows ``dist.monitored_barrier`` only for groups of the backend name "gloo". This function does the same for
    groups that fastcoll serves.

    Args:
        group: A group whose CPU tensors fastcoll serves. None: the default group.
        timeout: Limit of the wait. None: the group's timeout.
        wait_all_ranks: Whether the error names all late ranks. False: the first one only.

    Raises:
        ValueError: fastcoll does not serve the group's CPU tensors.
        dist.DistBackendError: A rank is late. The message names it.
    """
    if is_outside(group):
        return
    instead = "dist.monitored_barrier for a group of gloo"
    backend = needed_cpu_backend(group, "monitored_barrier", instead)
    backend.monitored_barrier(timeout or backend.options.timeout, wait_all_ranks)
