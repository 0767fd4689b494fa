"""Staging buffers. On the CPU the other ranks map their memory, and read messages in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll._group_backend import cpu_backend

__all__ = ["Staging"]


class Staging:
    """CPU buffers, each reused when nothing refers to its memory any more.

    The first use of new memory is slow, because the kernel clears each page. So this object keeps its buffers, up to
    twice the most bytes that were requested at once. Beyond that, it drops the least recently used ones. No buffer
    serves a request of less than half its size.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._most = 0  # bytes requested at once
        self._taken = 0  # requests so far

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a contiguous, uninitialised tensor; on a device, of torch's allocator."""
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
        """Drops unused buffers until `needed` bytes more fit. Used ones fit: at least half of each was requested."""
        excess = sum(kept.memory.numel() for kept in self._buffers) + needed - 2 * self._most
        for kept in sorted(self._buffers, key=lambda kept: kept.taken):
            if excess > 0 and not kept.is_used():
                excess -= kept.memory.numel()
                self._buffers.remove(kept)


class _Buffer:
    """Memory, the bytes of its last request, and the number of that request."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.asked = self.taken = 0
        self._unused = _uses(memory)

    def is_used(self) -> bool:
        return _uses(self.memory) != self._unused


def _uses(buffer: Tensor) -> int:
    """Returns the number of tensors and other objects that refer to the memory."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
