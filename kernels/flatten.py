"""Flatten: many tensors into one flat bucket, scaled and cast on the way.

    bucket[offset[t] + i] = cast(scale * tensor[t][i])

One launch for any number of tensors. Bytes: each element is read once and written once, so
elements * (source itemsize + wire itemsize), and 24 bytes of tables for each block of 2048 elements.
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

__all__ = ["Flatten", "configurations", "flatten_kernel"]


@triton.jit
def flatten_kernel(
    block_map,
    sizes,
    input_row,
    output_base,
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
    source = element_address(0, input_row, tensor, start, INPUT)
    target = element_address(output_base.to(tl.int64), output_row, tensor, start, OUTPUT)
    factor = factor_of(scale_bits, ACCUMULATE)
    move_block(source, target, left, factor, INPUT, OUTPUT, ACCUMULATE, BLOCK, NARROW)


def _table(blocking: Blocking) -> Mapping[tuple[torch.dtype, torch.dtype], Configuration]:
    return moves("flatten", flatten_kernel, PAIRS, blocking)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``Flatten`` can launch."""
    yield from _table(DEFAULT_BLOCKING).values()


class Flatten(Plan):
    """Flattens lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and their places in the bucket.
        dtype: Dtype of the tensors: float32, bfloat16, float16 or float64.
        wire_dtype: Dtype of the bucket: that of the tensors, or bfloat16 or float16 for float32. Rounded once, to
            nearest even; too large values convert as in ``torch.Tensor.to``.
        device: Device of all tensors.
        blocking: Size of a program's block.

    Raises:
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
        super().__init__(layout, _table(blocking)[dtype, wire_dtype], wire_dtype, device, blocking)

    def prepare(self, tensors: Sequence[Tensor], bucket: Tensor, scale: float = 1.0) -> C.Launch:
        """Returns a launch that can be repeated as long as the tensors keep their addresses.

        Args:
            tensors: The layout's tensors; each dense.
            bucket: Contiguous, at least ``layout.elements``. Gaps between tensors are not written.
            scale: Factor.
        """
        row = self._row(tensors)
        place = (row.data_ptr(), bucket.data_ptr(), self._offsets)
        return self._prepared((*place, double_bits(scale)), row, source_at=2)
