"""fastcoll's backend object of a group, if fastcoll serves the group's tensors on a device; and this rank's host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastcoll import env

__all__ = [
    *("all_gather_flat", "reduce_scatter_flat", "is_outside", "this_host"),
    *("cpu_backend", "needed_cpu_backend", "serving_backend"),
]

# The names since torch 2.13; 2.11 and 2.12 have the old ones only.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's all-gather into one tensor."""

reduce_scatter_flat: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch's reduce-scatter of one tensor."""


def this_host() -> str:
    """Returns an identity of this rank's host: equal on the ranks that share memory where the engine may choose."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return env.read()["FASTCOLL_HOST_ID"] or f"{boot} {os.readlink('/proc/self/ns/net')}"


def is_outside(group: Any) -> bool:
    """Returns whether this rank is not in a group: torch's group is a number then."""
    return group is dist.GroupMember.NON_GROUP_MEMBER


def cpu_backend(group: ProcessGroup | None, device: torch.device) -> Any:
    """Returns fastcoll's backend of a group for CPU tensors; None: another device, or another backend."""
    return serving_backend(group, device) if device.type == "cpu" else None


def needed_cpu_backend(group: ProcessGroup | None, call: str, instead: str) -> Any:
    """Returns fastcoll's backend for the CPU tensors of a group; None: of the default group.

    Raises:
        ValueError: There is none.
    """
    group = group or dist.group.WORLD
    # On a rank outside of a group torch has a number in its place.
    member = group is None or isinstance(group, ProcessGroup)
    backend = cpu_backend(group, torch.device("cpu")) if member else None
    if backend is None:
        name = "no group" if group is None else "a group without this rank"
        name = f"group '{group.group_name}'" if group is not None and member else name
        raise ValueError(
            f"fastcoll.{call}: expected a group whose CPU tensors fastcoll serves, got {name}. Call "
            f'init_process_group("fastcoll") first, or {instead}.'
        )
    return backend


def serving_backend(group: ProcessGroup | None, device: torch.device) -> Any:
    """Returns fastcoll's backend of a group for tensors on a device; None: another backend.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL this is the backend inside torch's wrapper.
    """
    if group is None:
        return None
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # the group has none for this device
        return None
    if backend.name() != "fastcoll":
        return None
    return getattr(backend, "wrapped_pg", backend)
