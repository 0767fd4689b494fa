"""Unflatten: a flat bucket back into many tensors, scaled and cast on the way.

    tensor[t][i] = cast(scale * bucket[offset[t] + i])

One launch for any number of tensors. Bytes: each element is read once and written once, so
elements * (wire itemsize + tensor itemsize), and 24 bytes of tables for each block of 2048 elements.
Bound: the bandwidth of device memory; a copy of as many bytes takes at least as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import BucketLayout
from fastcoll.kernels._arithmetic import factor_of
from fastcoll.kernels._blocks import element_address, locate
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import PAIRS
from fastcoll.kernels._move import move_block, moves
from fastcoll.kernels._plan import DEFAULT_BLOCKING, Blocking, Plan, double_bits

if TYPE_CHECKING:
    from fastcoll._load import C

__all__ = ["Unflatten", "configurations", "unflatten_kernel"]

_BACK = tuple((wire, dtype) for dtype, wire in PAIRS)


@triton.jit
def unflatten_kernel(
    block_map,
    sizes,
    input_base,
    input_row,
    output_row,
    scale_bits,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Moves one block. All arguments are int64: addresses of tables and of the bucket, and the factor's bits."""
    tensor, start, left = locate(block_map, sizes, BLOCK)
    source = element_address(input_base.to(tl.int64), input_row, tensor, start, INPUT)
    target = element_address(0, output_row, tensor, start, OUTPUT)
    factor = factor_of(scale_bits, ACCUMULATE)
    move_block(source, target, left, factor, INPUT, OUTPUT, ACCUMULATE, BLOCK, NARROW)


def _table(blocking: Blocking) -> Mapping[tuple[torch.dtype, torch.dtype], Configuration]:
    return moves("unflatten", unflatten_kernel, _BACK, blocking)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``Unflatten`` can launch."""
    yield from _table(DEFAULT_BLOCKING).values()


class Unflatten(Plan):
    """Unflattens buckets into lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and their places in the bucket.
        wire_dtype: Dtype of the bucket: float32, bfloat16, float16 or float64.
        dtype: Dtype of the tensors: that of the bucket, or float32 for bfloat16 and float16. Rounded once, to nearest
            even.
        device: Device of all tensors.
        blocking: Size of a program's block.

    Raises:
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
        super().__init__(layout, _table(blocking)[wire_dtype, dtype], wire_dtype, device, blocking)

    def prepare(self, bucket: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> C.Launch:
        """Returns a launch that can be repeated as long as the tensors keep their addresses.

        Args:
            bucket: Contiguous, at least ``layout.elements``.
            tensors: The layout's tensors; each dense, none overlapping another.
            scale: Factor.
        """
        row = self._row(tensors)
        place = (bucket.data_ptr(), self._offsets, row.data_ptr())
        return self._prepared((*place, double_bits(scale)), row, out_at=4)
