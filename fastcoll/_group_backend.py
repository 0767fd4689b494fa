"""The backend object that serves a group's tensors on a device, if it is fastcoll's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["cpu_backend", "needed_cpu_backend", "serving_backend"]


def cpu_backend(group: ProcessGroup | None, device: torch.device) -> Any:
    """Returns fastcoll's backend of a group for CPU tensors; None: the device or the backend is another."""
    return serving_backend(group, device) if device.type == "cpu" else None


def needed_cpu_backend(group: ProcessGroup | None, call: str, instead: str) -> Any:
    """Returns fastcoll's backend of a group, of the default one for None, for CPU tensors.

    Raises:
        ValueError: There is none.
    """
    group = group or dist.group.WORLD
    backend = cpu_backend(group, torch.device("cpu"))
    if backend is None:
        name = "no group" if group is None else f"group '{group.group_name}'"
        raise ValueError(
            f"fastcoll.{call}: expected a group whose CPU tensors fastcoll serves, got {name}. Call "
            f'init_process_group("fastcoll") first, or {instead}.'
        )
    return backend


def serving_backend(group: ProcessGroup | None, device: torch.device) -> Any:
    """Returns fastcoll's backend of a group for tensors on a device; None: the backend is another.

    It lies below the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds.
    """
    if group is None:
        return None
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # it has none for this device
        return None
    if backend.name() != "fastcoll":
        return None
    return getattr(backend, "wrapped_pg", backend)
