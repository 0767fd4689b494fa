"""Staging buffers: on the CPU in memory that the other ranks map, so that they read messages where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll._group_backend import cpu_backend

__all__ = ["Staging"]


class Staging:
    """Buffers on the CPU, given out again when nothing refers to their memory any more.

    New memory costs its first use: the kernel clears each page. They are kept as long as this object; none is given
    out for less than half of it, so that no more than twice the most that was in use at once is kept.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a contiguous tensor with any content; on a device by torch's allocator.

        Args:
            size: Shape.
            dtype: Of the elements.
            device: Where.
        """
        backend = cpu_backend(dist.group.WORLD, device)
        if backend is None:
            return torch.empty(size, dtype=dtype, device=device)
        elements = math.prod(size)
        needed = max(elements * dtype.itemsize, 1)
        for buffer, unused in self._buffers:
            if needed <= buffer.numel() <= 2 * needed and _uses(buffer) == unused:
                break
        else:
            buffer = backend.allocate_tensor(needed, dtype=torch.uint8, device=device)
            self._buffers.append((buffer, _uses(buffer)))
        return buffer[: elements * dtype.itemsize].view(dtype).view(size)


def _uses(buffer: Tensor) -> int:
    """Returns how many tensors and others refer to the memory."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
