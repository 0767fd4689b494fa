"""Flatten: many tensors into one flat bucket, scaled and cast on the way.

    bucket[offset[t] + i] = cast(scale * tensor[t][i])

One launch for any number of tensors. Bytes: each element is read once and written once, so
elements * (source itemsize + wire itemsize), and 24 bytes of tables for each block of 4096 elements.
Bound: the bandwidth of device memory; a copy of as many bytes is the floor.
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
from fastcoll.kernels._sides import Flat, Scattered, require_no_overlap
from fastcoll.kernels._statistics import Statistics

__all__ = ["Flatten", "configurations", "flatten_kernel"]


@triton.jit(do_not_specialize=ALL_INTEGERS)
def flatten_kernel(
    block_map,
    sizes,
    input_row,
    output_base,
    output_row,
    scale_bits,
    scale_address,
    statistics,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Moves one block. All arguments are int64: addresses of tables, of the bucket, of scalars or 0."""
    tensor, start, left = locate(block_map, sizes, BLOCK)
    source = element_address(0, input_row, tensor, start, INPUT)
    target = element_address(output_base.to(tl.int64), output_row, tensor, start, OUTPUT)
    factor = scale_factor(scale_bits, scale_address, ACCUMULATE)
    move_block(
        source, target, left, factor, 0, statistics, INPUT, OUTPUT, ACCUMULATE, BLOCK, NARROW
    )


def _table(blocking: Blocking) -> Mapping[tuple[object, ...], Configuration]:
    return moves("flatten", flatten_kernel, PAIRS, blocking)


def configurations() -> Iterator[Configuration]:
    """Yields all that :class:`Flatten` can launch."""
    yield from _table(DEFAULT_BLOCKING).values()


class Flatten(Plan):
    """Flattens lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and where each goes.
        dtype: Of the tensors: float32, bfloat16, float16 or float64.
        wire_dtype: Of the bucket: that of the tensors, or for float32 bfloat16 or float16. Rounded once, to nearest
            even; what is too large becomes what ``torch.Tensor.to`` makes of it.
        device: Of all tensors.
        blocking: How much a program does.

    Raises:
        TypeError: There is no kernel for these dtypes.
        ValueError: Kernels cannot run on that device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        device: torch.device | str,
        blocking: Blocking = DEFAULT_BLOCKING,
    ) -> None:
        configuration = configuration_of(_table(blocking), (dtype, wire_dtype), "Flatten")
        super().__init__(layout, configuration, accumulate_dtype(dtype), device, blocking)
        self._sources = Scattered(layout, dtype, self.device)
        self._bucket = Flat(layout, wire_dtype, self.device)
        self._itemsizes = (dtype.itemsize, wire_dtype.itemsize)

    def prepare(
        self,
        tensors: Sequence[Tensor],
        bucket: Tensor,
        scale: float | Tensor = 1.0,
        statistics: Statistics | None = None,
    ) -> PreparedLaunch:
        """Returns a launch that can be repeated as long as the tensors lie where they are.

        Args:
            tensors: Of the layout; each dense.
            bucket: Contiguous, at least ``layout.elements``. Gaps between tensors are not written.
            scale: Factor; a float32 scalar on the device (float64 for float64) is read when the kernel runs.
            statistics: Where norm and finiteness go, or None.

        Raises:
            TypeError: A dtype is not the plan's.
            ValueError: Tensors or bucket do not fit the layout, overlap, or are elsewhere.
        """
        base = self._bucket.base(bucket, "bucket")
        rows, addresses = self._sources.rows([tensors], "tensors")
        itemsize, wire_itemsize = self._itemsizes
        written = (self._bucket.addresses(base), wire_itemsize)
        require_no_overlap(self.layout.sizes, written, (addresses, itemsize), "tensors")
        arguments = (
            rows.data_ptr(),
            base,
            self._bucket.row,
            *self._scale(scale),
            self._statistics(statistics),
        )
        return self._prepared(arguments, statistics, rows)

    def __call__(
        self,
        tensors: Sequence[Tensor],
        bucket: Tensor,
        scale: float | Tensor = 1.0,
        statistics: Statistics | None = None,
    ) -> None:
        """Launches on the current stream; arguments and errors are those of :meth:`prepare`."""
        self.prepare(tensors, bucket, scale, statistics)()
