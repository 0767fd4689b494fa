"""The memory that all ranks of a group have mapped, as one rank sees it: the kernels' buffers and a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcoll.cuda.channels import ChannelShare

__all__ = ["PeerMemory"]


class PeerMemory:
    """The regions of all ranks, as this rank maps them: the kernels' buffers, and behind them a bucket.

    Args:
        buffers: A ``PeerBuffers`` of fastcoll.kernels, over the first part of the regions.
        memory: This rank's region; keeps the peers' regions mapped.
        addresses: Addresses of all ranks' regions.
        bucket_at: Offset of the bucket in a region, in bytes.
        share: The programs that the launches may have.
        unmap: Frees `memory`.

    Attributes:
        buffers: As given.
        buckets: Addresses of all ranks' buckets: int64 [ranks], on the device.
    """

    def __init__(
        self,
        buffers: Any,
        memory: Tensor,
        addresses: Sequence[int],
        bucket_at: int,
        share: ChannelShare,
        unmap: Callable[[Tensor], None],
    ) -> None:
        self._share = share
        self._unmap = unmap
        self.buffers = buffers
        begins = [each + bucket_at for each in addresses]
        self.buckets = torch.tensor(begins, dtype=torch.int64, device=memory.device)
        self._bucket = memory[bucket_at:]
        self._memory = memory

    def bucket(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns this rank's bucket.

        Raises:
            ValueError: The bucket is too small.
        """
        size = elements * dtype.itemsize
        if size > self._bucket.numel():
            raise ValueError(
                f"expected a bucket of at most {self._bucket.numel()} bytes, got {size}. Use fewer tensors."
            )
        return self._bucket[:size].view(dtype)

    def limit_waits(self, timeout: float) -> None:
        """Sets the wait limit of launches prepared from now on: later than the group's timeout, in seconds.

        The watchdog ends a wait at the timeout, with a better error.
        """
        self.buffers.seconds = 2 * timeout

    def close(self) -> None:
        """Refuses to prepare launches; call it when no launch is running and none that exists will run."""
        self.buffers.close()
        self._share.close()

    def free(self) -> None:
        """Frees the memory; call it after ``close``. Waits for the device, without the GIL."""
        self._unmap(self._memory)
