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

    New memory costs its first use: the kernel clears each page. So buffers are kept, as long as this object and for as
    long as all of them take no more than twice the most that was asked for at once: then those that have not been used
    for the longest time make room. None is given out for less than half of it.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._most = 0  # bytes, asked for at once
        self._taken = 0  # times

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
        asked = sum(kept.asked for kept in self._buffers if kept.is_used())
        self._most = max(self._most, asked + needed)
        for kept in self._buffers:
            if needed <= kept.memory.numel() <= 2 * needed and not kept.is_used():
                break
        else:
            self._make_room(needed)
            kept = _Buffer(backend.allocate_tensor(needed, dtype=torch.uint8, device=device))
            self._buffers.append(kept)
        self._taken += 1
        kept.asked, kept.taken = needed, self._taken
        return kept.memory[: elements * dtype.itemsize].view(dtype).view(size)

    def _make_room(self, needed: int) -> None:
        """Drops unused buffers until so many bytes more can be kept; half of a used one was asked for at least."""
        excess = sum(kept.memory.numel() for kept in self._buffers) + needed - 2 * self._most
        for kept in sorted(self._buffers, key=lambda kept: kept.taken):
            if excess > 0 and not kept.is_used():
                excess -= kept.memory.numel()
                self._buffers.remove(kept)


class _Buffer:
    """Memory, how much of it was asked for, and when."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.asked = self.taken = 0
        self._unused = _uses(memory)

    def is_used(self) -> bool:
        return _uses(self.memory) != self._unused


def _uses(buffer: Tensor) -> int:
    """Returns how many tensors and others refer to the memory."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
