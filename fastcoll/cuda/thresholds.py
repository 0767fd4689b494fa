"""Size limits of the all-reduce algorithms on devices.

A separate file, because every group reads the tuning table, even without a device.

Kernels serve no all-reduce by default: no limit of theirs was measured on any GPU. ``fastcoll tune --device
cuda`` measures the limits on a machine and writes a table; FASTCOLL_ALGO forces an algorithm whatever the table has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DEFAULT", "Thresholds", "device_name"]


@dataclass(frozen=True)
class Thresholds:
    """The largest message of each algorithm: the section of the tuning table for devices.

    Attributes:
        one_shot_bytes: Largest message, as it travels, for one_shot. In bytes, as all but `list_tensors`.
        two_shot_bytes: Largest message for two_shot; ring and NCCL take larger ones.
        ring_bytes: Largest message for ring.
        list_tensors: Least number of tensors reduced together to fuse into a bucket.
        list_bytes: Largest mean size of such tensors.
    """

    one_shot_bytes: int = 0
    two_shot_bytes: int = 0
    ring_bytes: int = 0
    list_tensors: int = 4
    list_bytes: int = 1 << 20

    @property
    def kernel_bytes(self) -> int:
        """Largest message that a kernel takes; 0: none was measured."""
        return max(self.one_shot_bytes, self.two_shot_bytes, self.ring_bytes)

    @property
    def limits(self) -> list[int]:
        """The sizes at which the choice of the algorithm for a tensor changes, in order."""
        return sorted({self.one_shot_bytes, self.two_shot_bytes, self.ring_bytes})


DEFAULT = Thresholds()
"""The limits for devices without a measured table."""


def device_name(device: torch.device) -> str:
    """Returns the name of a device, by which a table has its sections."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
