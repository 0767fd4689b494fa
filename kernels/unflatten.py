"""Unflatten: a flat bucket back into many tensors, scaled and cast on the way.

    tensor[t][i] = cast(scale * bucket[offset[t] + i])
    tensor[t][i] = cast(tensor[t][i] + scale * bucket[offset[t] + i])     when it accumulates

One launch for any number of tensors. Bytes: each element is read once and written once, so
elements * (wire itemsize + tensor itemsize), once more the tensor's when it accumulates, and 24 bytes of
tables for each block of 4096 elements. Bound: the bandwidth of device memory; a copy of as many bytes
is the floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import BucketLayout
from fastcoll.kernels._blocks import ALL_INTEGERS, element_address, locate, scale_factor
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import PAIRS, accumulate_dtype
from fastcoll.kernels._move import move_block, moves
from fastcoll.kernels._plan import (
    DEFAULT_BLOCKING,
    Blocking,
    Plan,
    configuration_of,
)
from fastcoll.kernels._prepared import PreparedLaunch
from fastcoll.kernels._sides import Flat, Scattered, require_apart, require_no_overlap
from fastcoll.kernels._statistics import Statistics

__all__ = ["Unflatten", "configurations", "unflatten_kernel"]

_BACK = tuple((wire, dtype) for dtype, wire in PAIRS)


@triton.jit(do_not_specialize=ALL_INTEGERS)
def unflatten_kernel(
    block_map,
    sizes,
    input_base,
    input_row,
    output_row,
    scale_bits,
    scale_address,
    accumulate,
    statistics,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Moves one block. All arguments are int64: addresses of tables, of the bucket, of scalars or 0."""
    tensor, start, left = locate(block_map, sizes, BLOCK)
    source = element_address(input_base.to(tl.int64), input_row, tensor, start, INPUT)
    target = element_address(0, output_row, tensor, start, OUTPUT)
    factor = scale_factor(scale_bits, scale_address, ACCUMULATE)
    move_block(
        source,
        target,
        left,
        factor,
        accumulate,
        statistics,
        INPUT,
        OUTPUT,
        ACCUMULATE,
        BLOCK,
        NARROW,
    )


def _table(blocking: Blocking) -> Mapping[tuple[object, ...], Configuration]:
    return moves("unflatten", unflatten_kernel, _BACK, blocking)


def configurations() -> Iterator[Configuration]:
    """Yields all that :class:`Unflatten` can launch."""
    yield from _table(DEFAULT_BLOCKING).values()


class Unflatten(Plan):
    """Unflattens buckets into lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and where each lies in the bucket.
        wire_dtype: Of the bucket: float32, bfloat16, float16 or float64.
        dtype: Of the tensors: that of the bucket, or float32 for bfloat16 and float16. Rounded once, to nearest even.
        device: Of all tensors.
        blocking: How much a program does.

    Raises:
        TypeError: There is no kernel for these dtypes.
        ValueError: Kernels cannot run on that device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str,
        blocking: Blocking = DEFAULT_BLOCKING,
    ) -> None:
        configuration = configuration_of(_table(blocking), (wire_dtype, dtype), "Unflatten")
        super().__init__(layout, configuration, accumulate_dtype(wire_dtype), device, blocking)
        self._bucket = Flat(layout, wire_dtype, self.device)
        self._targets = Scattered(layout, dtype, self.device)
        self._itemsizes = (wire_dtype.itemsize, dtype.itemsize)

    def prepare(
        self,
        bucket: Tensor,
        tensors: Sequence[Tensor],
        scale: float | Tensor = 1.0,
        accumulate: bool = False,
        statistics: Statistics | None = None,
    ) -> PreparedLaunch:
        """Returns a launch that can be repeated as long as the tensors lie where they are.

        Args:
            bucket: Contiguous, at least ``layout.elements``.
            tensors: Of the layout; each dense, none overlapping another.
            scale: Factor; a float32 scalar on the device (float64 for float64) is read when the kernel runs.
            accumulate: Add to what the tensors hold, in float32, instead of overwriting it.
            statistics: Where norm and finiteness of the results go, or None.

        Raises:
            TypeError: A dtype is not the plan's.
            ValueError: Tensors or bucket do not fit the layout, overlap, or are elsewhere.
        """
        base = self._bucket.base(bucket, "bucket")
        row, addresses = self._targets.rows([tensors], "tensors")
        wire_itemsize, itemsize = self._itemsizes
        require_apart(self.layout.sizes, addresses, itemsize, "tensors")
        read = (self._bucket.addresses(base), wire_itemsize)
        require_no_overlap(self.layout.sizes, (addresses, itemsize), read, "bucket")
        arguments = (
            base,
            self._bucket.row,
            row.data_ptr(),
            *self._scale(scale),
            int(accumulate),
            self._statistics(statistics),
        )
        return self._prepared(arguments, statistics, row, place=2)

    def __call__(
        self,
        bucket: Tensor,
        tensors: Sequence[Tensor],
        scale: float | Tensor = 1.0,
        accumulate: bool = False,
        statistics: Statistics | None = None,
    ) -> None:
        """Launches on the current stream; arguments and errors are those of :meth:`prepare`."""
        self.prepare(bucket, tensors, scale, accumulate, statistics)()
