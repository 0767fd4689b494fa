"""Where all-reduce algorithms on devices give way to each other.

By itself, as every group reads the tuning table, also those that never see a device.

Kernels serve no all-reduce by default: no limit of theirs was measured on any GPU. ``fastcoll tune --device
cuda`` measures them on a machine and writes a table; FASTCOLL_ALGO asks for an algorithm whatever the table has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["DEFAULT", "Thresholds", "device_name"]


@dataclass(frozen=True)
class Thresholds:
    """Where one algorithm gives way to the next: the section of the tuning table that is about devices.

    Attributes:
        one_shot_bytes: Largest message, as it travels, that one_shot takes. In bytes, as all but `list_tensors`.
        two_shot_bytes: Largest that two_shot takes; beyond come ring and NCCL.
        ring_bytes: Largest that ring takes.
        list_tensors: Least number of tensors reduced together that are fused into a bucket.
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

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the fields."""
        return tuple(field.name for field in fields(cls))


DEFAULT = Thresholds()
"""The limits of devices that no table has measured."""


def device_name(device: torch.device) -> str:
    """Returns the name of a device, for which a section of a table counts."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
