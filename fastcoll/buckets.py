"""Layouts of flat buckets, and the tables with which one kernel launch serves any number of tensors.

A *bucket* is one flat buffer for many tensors. ``BucketLayout`` has the place of each tensor in it, and divides
the elements among the programs of a kernel. ``address_table`` makes a table of the addresses of tensors outside of it.
This file is in layer 0, without kernels, like fastcoll/env.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["BLOCK", "GRAIN", "PIECE", "BucketLayout", "address_table", "require_apart"]

GRAIN = 16
"""Elements: parts of messages and buckets begin at multiples of this, so they are aligned in every dtype."""

# Eight elements for each thread are two 128-bit loads of float32 in flight, and eight programs fit on a multiprocessor
# (32 registers a thread). On an H200 the gradients of GPT-2 medium are copied 3 % faster than with twice the block.
BLOCK = 2048
"""Elements of a program of the kernels that copy between tensors and a bucket."""

PIECE = 8192
"""The most elements of a bucket that one rank reduces for the others."""


def require_apart(sizes: Sequence[int], addresses: Sequence[int], itemsize: int, name: str) -> None:
    """Checks that tensors to be written do not overlap.

    Args:
        sizes: Elements of each tensor.
        addresses: Address of each tensor.
        itemsize: Bytes of an element.
        name: Name of the list, for the message.

    Raises:
        ValueError: Two tensors overlap.
    """
    extents = sorted(
        (address, address + size * itemsize, index)
        for index, (address, size) in enumerate(zip(addresses, sizes, strict=True))
        if size
    )
    for (_, end, first), (begin, _, second) in pairwise(extents):
        if begin < end:
            raise ValueError(
                f"{name}: expected tensors apart from one another, got overlapping memory in {name}[{first}] "
                f"and {name}[{second}]. Pass each tensor once."
            )


class BucketLayout:
    """The place of each tensor in a bucket. Elements keep the order that they have in their tensor's memory.

    Tables on a device are made at first use, and kept.

    Args:
        sizes: Elements of each tensor; 0 is allowed.
        alignment: Each tensor begins at a multiple of this many elements; 1 leaves no gaps, as in DDP.

    Attributes:
        sizes: Elements of each tensor.
        offsets: Offset of each tensor in the bucket, in elements.
        elements: Elements of the bucket, with the gaps between tensors.

    Raises:
        ValueError: A size is negative, or the alignment is not positive.
    """

    def __init__(self, sizes: Iterable[int], alignment: int = 1) -> None:
        self.sizes = tuple(sizes)
        if alignment < 1:
            raise ValueError(f"alignment: expected at least 1 element, got {alignment}.")
        offsets, end = [], 0
        for index, size in enumerate(self.sizes):
            if size < 0:
                raise ValueError(f"sizes[{index}]: expected at least 0 elements, got {size}.")
            begin = -(-end // alignment) * alignment
            offsets.append(begin)
            end = begin + size
        self.offsets = tuple(offsets)
        self.elements = end
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def new_bucket(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Returns a bucket: 1-D, of zeros, because gaps are summed too."""
        return torch.zeros(self.elements, dtype=dtype, device=device)

    def views(self, bucket: Tensor) -> list[Tensor]:
        """Returns the bucket's part for each tensor, 1-D."""
        return [
            bucket[begin : begin + size]
            for begin, size in zip(self.offsets, self.sizes, strict=True)
        ]

    def blocks(self, block: int) -> int:
        """Returns the number of blocks; each has at most `block` elements, of one tensor."""
        return sum(-(-size // block) for size in self.sizes)

    def block_map(self, block: int, device: torch.device) -> Tensor:
        """Returns (tensor, piece) of each block: int32 [blocks, 2]; piece p begins at element p * block.

        Raises:
            ValueError: There are more blocks than one launch can have programs.
        """
        if self.blocks(block) >= 2**31:
            raise ValueError(
                f"expected a bucket of less than 2^31 blocks of {block} elements, got {self.elements} "
                "elements. Split it."
            )

        def build() -> Tensor:
            pieces = torch.tensor([-(-size // block) for size in self.sizes], dtype=torch.int64)
            tensors = torch.repeat_interleave(torch.arange(len(self.sizes)), pieces)
            firsts = torch.cumsum(pieces, 0) - pieces
            return torch.stack([tensors, torch.arange(len(tensors)) - firsts[tensors]], 1).int()

        return self._table(("block_map", block, device), build, device)

    def device_sizes(self, device: torch.device) -> Tensor:
        """Returns the sizes: int64 [tensors]."""
        return self._table(
            ("sizes", device), lambda: torch.tensor(self.sizes, dtype=torch.int64), device
        )

    def byte_offsets(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the offset of each tensor in a bucket of `dtype`, in bytes: int64 [tensors]."""
        size = dtype.itemsize
        return self._table(
            ("byte_offsets", size, device),
            lambda: torch.tensor(self.offsets, dtype=torch.int64) * size,
            device,
        )

    def read_here(self) -> None:
        """Keeps the memory of dropped tables until the current streams have done the work queued before the drop.

        Call this on every stream whose kernels read the tables. Another stream has usually made them.
        """
        for table in list(self._tables.values()):  # another thread may add one
            used_here(table)

    def _table(
        self, key: tuple[object, ...], build: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        table = self._tables.get(key)
        if table is None:
            # If two threads make the table, both get the first one: launches keep its address only.
            with torch.device("cpu"):  # not the default device
                host = build().contiguous()
            made = _copied(host, device, for_every_stream=True)
            table = self._tables.setdefault(key, made)
        return table

    def __repr__(self) -> str:
        return (
            f"BucketLayout({len(self.sizes)} tensors of {sum(self.sizes)} elements, "
            f"{self.elements} with gaps)"
        )


def used_here(tensor: Tensor) -> Tensor:
    """Returns a tensor that another stream has made and allocated, after recording its use on this stream."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_apart(device: torch.device) -> torch.Stream:
    """Returns a stream that no graph captures."""
    while True:  # torch's pool gives its streams in turn
        stream = torch.Stream(device)
        with stream:
            if not _is_captured(device):
                return stream


def _copied(host: Tensor, device: torch.device, for_every_stream: bool = False) -> Tensor:
    """Returns a table on a device, for kernels on its current stream, or on every stream.

    If a graph captures the current stream, another stream makes the copy, and the host waits for it. A captured copy
    would run in replays only, so calls outside of the graph would read uninitialised memory.
    """
    if device.type == "cpu":
        return host
    if _is_captured(device):
        with _stream_apart(device):
            table = host.to(device)
        return used_here(table)
    if for_every_stream:  # from pageable memory: the copy is over when this returns
        return host.to(device)
    # torch keeps pinned memory from reuse until the copy has read it.
    return host.pin_memory().to(device, non_blocking=True)


def address_table(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Returns an int64 table of addresses, for kernels on the current stream; keep it until they are launched."""
    return _copied(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)
