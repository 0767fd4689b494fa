"""The two kinds of sides a launch has, and what is checked of them: flat buckets, and tensors in a list."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fastcoll.buckets import AddressTable, BucketLayout, require_dense
from fastcoll.kernels._dtypes import dtype_name

__all__ = ["Flat", "Scattered", "require_apart", "require_no_overlap"]


class Flat:
    """Checks flat buckets: their part in a launch is one address."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self.row = layout.byte_offsets(dtype, device).data_ptr()

    def addresses(self, base: int) -> list[int]:
        """Returns the address of each tensor's place in the bucket at `base`."""
        size = self._dtype.itemsize
        return [base + offset * size for offset in self._layout.offsets]

    def base(self, bucket: Tensor, name: str) -> int:
        """Returns the address of a bucket.

        Raises:
            TypeError: Its dtype is another one.
            ValueError: It has fewer elements than the layout, or gaps, or is on another device.
        """
        if bucket.dtype != self._dtype:
            raise TypeError(
                f"{name}: expected {dtype_name(self._dtype)}, got {dtype_name(bucket.dtype)}. "
                "Make a plan for that dtype."
            )
        if bucket.device != self._device:
            raise ValueError(
                f"{name}: expected it on {self._device}, got {bucket.device}. Move it there."
            )
        if bucket.numel() < self._layout.elements or not bucket.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor of at least {self._layout.elements} elements, got shape "
                f"{tuple(bucket.shape)} with strides {bucket.stride()}. Use layout.new_bucket()."
            )
        return bucket.data_ptr()


class Scattered:
    """Checks lists of tensors of a layout and keeps their addresses on the device."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._table = AddressTable(device)

    def rows(self, lists: Sequence[Sequence[Tensor]], name: str) -> tuple[Tensor, list[int]]:
        """Returns a table on the device, one row of addresses for each list, and its contents.

        Raises:
            TypeError: A tensor is of another dtype.
            ValueError: A list or a tensor has another length than the layout says, a tensor has gaps or
                is on another device.
        """
        addresses: list[int] = []
        for rank, tensors in enumerate(lists):
            label = name if len(lists) == 1 else f"{name}[{rank}]"
            if len(tensors) != len(self._layout.sizes):
                raise ValueError(
                    f"{label}: expected {len(self._layout.sizes)} tensors, got {len(tensors)}. "
                    "Make a layout for these."
                )
            for index, (tensor, size) in enumerate(zip(tensors, self._layout.sizes, strict=True)):
                if (
                    tensor.dtype != self._dtype
                    or tensor.device != self._device
                    or tensor.numel() != size
                    or not tensor.is_contiguous()
                ):
                    self._complain(tensor, size, f"{label}[{index}]")
                addresses.append(tensor.data_ptr())
        return self._table.refresh(addresses), addresses

    def _complain(self, tensor: Tensor, size: int, name: str) -> None:
        if tensor.dtype != self._dtype:
            raise TypeError(
                f"{name}: expected {dtype_name(self._dtype)}, got {dtype_name(tensor.dtype)}. "
                "Make a plan for that dtype."
            )
        if tensor.device != self._device:
            raise ValueError(
                f"{name}: expected it on {self._device}, got {tensor.device}. Move it there."
            )
        if tensor.numel() != size:
            raise ValueError(
                f"{name}: expected {size} elements, got {tensor.numel()}. Make a layout for these tensors."
            )
        require_dense(tensor, name)


def require_apart(sizes: Sequence[int], addresses: Sequence[int], itemsize: int, name: str) -> None:
    """Checks that tensors to be written do not overlap one another.

    Args:
        sizes: Elements of each tensor.
        addresses: Of each tensor.
        itemsize: Bytes of an element.
        name: Of the list, for the message.

    Raises:
        ValueError: Two do.
    """
    extents = _extents(sizes, addresses, itemsize)
    for (_, end, first), (begin, _, second) in pairwise(extents):
        if begin < end:
            raise ValueError(
                f"{name}: expected tensors apart from one another, got overlapping memory in {name}[{first}] "
                f"and {name}[{second}]. Pass each tensor once."
            )


def require_no_overlap(
    sizes: Sequence[int],
    written: tuple[Sequence[int], int],
    read: tuple[Sequence[int], int],
    name: str,
) -> None:
    """Checks that nothing is written where something else is read; a tensor may be written in place.

    Args:
        sizes: Elements of each tensor.
        written: Address of each tensor that is written, none overlapping another, and bytes of an element.
        read: Address of each tensor that is read, and bytes of an element.
        name: Of what is read, for the message.

    Raises:
        ValueError: A tensor that is read overlaps one that is written without being the same.
    """
    targets = _extents(sizes, *written)
    if not targets:
        return
    low, high = targets[0][0], targets[-1][1]
    in_place = written[1] == read[1]
    begins: list[int] = []
    for index, (begin, size) in enumerate(zip(read[0], sizes, strict=True)):
        end = begin + size * read[1]
        if end <= low or begin >= high or not size:
            continue
        begins = begins or [extent[0] for extent in targets]
        for target in targets[max(bisect_right(begins, begin) - 1, 0) : bisect_left(begins, end)]:
            same = in_place and target[0] == begin and target[2] == index
            if target[1] > begin and not same:
                raise ValueError(
                    f"{name}: expected memory apart from what is written, got an overlap of tensor {index}. "
                    "Write to other memory, or to exactly the same."
                )


def _extents(
    sizes: Sequence[int], addresses: Sequence[int], itemsize: int
) -> list[tuple[int, int, int]]:
    return sorted(
        (address, address + size * itemsize, index)
        for index, (address, size) in enumerate(zip(addresses, sizes, strict=True))
        if size
    )
