"""Flatten: many tensors into one flat bucket. Unflatten: the way back. Both scale and cast on the way.

    bucket[offset[t] + i] = cast(scale * tensor[t][i])         Flatten
    tensor[t][i] = cast(scale * bucket[offset[t] + i])         Unflatten

One launch for any number of tensors. Bytes: each element is read once and written once, so
elements * (tensor itemsize + wire itemsize), and 24 bytes of tables for each block of 2048 elements. Unflatten can
also sum the squares of what it writes, after rounding: in float64, 8 bytes more for each block.
Bound: the bandwidth of device memory; a copy of as many bytes takes at least as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import BLOCK, BucketLayout, address_table
from fastcoll.kernels._arithmetic import factor_of
from fastcoll.kernels._blocks import element_address, is_wide, load, locate, store
from fastcoll.kernels._configuration import (
    UNFUSED,
    Configuration,
    configuration_of,
    double_bits,
)
from fastcoll.kernels._dtypes import (
    ELEMENT,
    PAIRS,
    accumulate_dtype,
    addressed,
    dtype_name,
    narrow,
    widen,
)
from fastcoll.kernels._launch import Launch, kernel_on, prepared

__all__ = ["Flatten", "Unflatten", "configurations", "flatten_kernel", "unflatten_kernel"]

_Table = Mapping[tuple[torch.dtype, torch.dtype], Configuration]
_PAIRS = (*PAIRS, (torch.float64, torch.float64))  # NCCL sums float64
_NARROW = 1024
"""Elements of a step through a block that is partial or unaligned: four for each thread."""


@triton.jit
def move_block(
    source, target, left, factor,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Writes a block's elements times `factor`.

    `source` and `target` are addresses; `left` is the number of the tensor's elements from there on.
    """
    if is_wide(source | target, left, BLOCK):
        values = load(source, left, INPUT, BLOCK, True) * factor
        store(target, left, values, OUTPUT, BLOCK, True)
    else:
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            here = source + first * (INPUT.primitive_bitwidth // 8)
            there = target + first * (OUTPUT.primitive_bitwidth // 8)
            values = load(here, left - first, INPUT, NARROW, False) * factor
            store(there, left - first, values, OUTPUT, NARROW, False)


@triton.jit
def move_and_measure(
    source, target, left, factor,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``move_block``; returns the sum of the squares of what it writes, in float64.

    In float64 no square of a float32 overflows. Both branches share one sum, so its order does not depend on the
    addresses, which differ between ranks.
    """
    if is_wide(source | target, left, BLOCK):
        values = load(source, left, INPUT, BLOCK, True) * factor
        store(target, left, values, OUTPUT, BLOCK, True)
    else:
        values = load(source, left, INPUT, BLOCK, False) * factor
        store(target, left, values, OUTPUT, BLOCK, False)
    written = widen(narrow(values, OUTPUT), OUTPUT, tl.float64)
    return tl.sum(written * written)


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
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Moves one block. All arguments are int64: addresses of tables and of the bucket, and the factor's bits."""
    tensor, start, left = locate(block_map, sizes, tl.program_id(0).to(tl.int64), BLOCK)
    source = element_address(0, input_row, tensor, start, INPUT)
    target = element_address(output_base.to(tl.int64), output_row, tensor, start, OUTPUT)
    factor = factor_of(scale_bits, accumulate_dtype(INPUT))
    move_block(source, target, left, factor, INPUT, OUTPUT, BLOCK, NARROW)


@triton.jit
def unflatten_kernel(
    block_map,
    sizes,
    input_base,
    input_row,
    output_row,
    scale_bits,
    squares,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """Moves one block. All arguments are int64: addresses of tables and of the bucket, and the factor's bits.

    `squares` is the address of a float64 for each block, which is set if MEASURES.
    """
    tensor, start, left = locate(block_map, sizes, tl.program_id(0).to(tl.int64), BLOCK)
    source = element_address(input_base.to(tl.int64), input_row, tensor, start, INPUT)
    target = element_address(0, output_row, tensor, start, OUTPUT)
    factor = factor_of(scale_bits, accumulate_dtype(INPUT))
    if MEASURES:
        square = move_and_measure(source, target, left, factor, INPUT, OUTPUT, BLOCK)
        tl.store(addressed(squares, tl.float64) + tl.program_id(0), square)
    else:
        move_block(source, target, left, factor, INPUT, OUTPUT, BLOCK, NARROW)


def _table(
    name: str,
    kernel: Any,
    pairs: Sequence[tuple[torch.dtype, torch.dtype]],
    end: str = "",
    **constexprs: Any,
) -> _Table:
    """Returns the configuration of each pair of dtypes, from and to."""
    return {
        (source, target): configuration_of(
            f"{name} {dtype_name(source)}->{dtype_name(target)}{end}",
            kernel,
            options=UNFUSED,
            INPUT=ELEMENT[source],
            OUTPUT=ELEMENT[target],
            BLOCK=BLOCK,
            NARROW=_NARROW,
            **constexprs,
        )
        for source, target in pairs
    }


class _Move:
    """Base of Flatten and Unflatten: the layout's tables, and the launches' common arguments."""

    table: ClassVar[_Table]
    measuring: ClassVar[_Table]

    def __init__(
        self,
        layout: BucketLayout,
        source: torch.dtype,
        target: torch.dtype,
        device: torch.device | str,
        measures: bool = False,
    ) -> None:
        device = torch.device(device)
        self.layout = layout
        self._configuration = (self.measuring if measures else self.table)[source, target]
        self._device = device
        kernel_on(self._configuration, device)
        self._grid = layout.blocks(BLOCK)
        self._tables = (
            layout.block_map(BLOCK, device).data_ptr(),
            layout.device_sizes(device).data_ptr(),
        )
        bucket = min(source, target, key=lambda dtype: dtype.itemsize)
        self._offsets = layout.byte_offsets(bucket, device).data_ptr()

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a table of the tensors' addresses on the device."""
        return address_table([tensor.data_ptr() for tensor in tensors], self._device)

    def _prepared(
        self, places: tuple[int, ...], scale: float, row: Tensor, *more: int, **at: int
    ) -> Launch:
        """Returns the launch; `more`: arguments behind the factor; `at`: indices of arguments that a plan replaces."""
        every = (*self._tables, *places, double_bits(scale), *more)
        held = (self.layout, row)
        return prepared(self._configuration, self._device, self._grid, every, held, **at)


class Flatten(_Move):
    """Flattens lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and their places in the bucket.
        source: Dtype of the tensors: float32, bfloat16, float16 or float64.
        target: Dtype of the bucket: that of the tensors, or bfloat16 or float16 for float32. Rounded once, to
            nearest even; too large values convert as in ``torch.Tensor.to``.
        device: Device of all tensors.

    Raises:
        ValueError: Kernels cannot run on that device.
    """

    table = _table("flatten", flatten_kernel, _PAIRS)

    def prepare(self, tensors: Sequence[Tensor], bucket: Tensor, scale: float = 1.0) -> Launch:
        """Returns a launch that can be repeated as long as the tensors keep their addresses.

        Args:
            tensors: The layout's tensors; each dense.
            bucket: Contiguous, at least ``layout.elements``. Gaps between tensors are not written.
            scale: Factor.
        """
        row = self._row(tensors)
        places = (row.data_ptr(), bucket.data_ptr(), self._offsets)
        return self._prepared(places, scale, row, source_at=2)


class Unflatten(_Move):
    """Unflattens buckets into lists of tensors of one layout.

    Args:
        layout: Sizes of the tensors, and their places in the bucket.
        source: Dtype of the bucket: float32, bfloat16, float16 or float64.
        target: Dtype of the tensors: that of the bucket, or float32 for bfloat16 and float16. Rounded once, to nearest
            even.
        device: Device of all tensors.
        measures: Whether to sum the squares of what is written.

    Raises:
        ValueError: Kernels cannot run on that device.
    """

    _back = tuple((wire, dtype) for dtype, wire in _PAIRS)
    table = _table("unflatten", unflatten_kernel, _back, MEASURES=False)
    measuring = _table("unflatten", unflatten_kernel, _back, " measured", MEASURES=True)

    def prepare(
        self, bucket: Tensor, tensors: Sequence[Tensor], scale: float = 1.0, squares: int = 0
    ) -> Launch:
        """Returns a launch that can be repeated as long as the tensors keep their addresses.

        Args:
            bucket: Contiguous, at least ``layout.elements``.
            tensors: The layout's tensors; each dense, none overlapping another.
            scale: Factor.
            squares: If it measures: address of a float64 for each of ``layout.blocks(BLOCK)`` blocks, in order. A plan
                adds the address of its call.
        """
        row = self._row(tensors)
        places = (bucket.data_ptr(), self._offsets, row.data_ptr())
        return self._prepared(places, scale, row, squares, out_at=4, squares_at=6)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``Flatten`` and ``Unflatten`` can launch."""
    for table in (Flatten.table, Unflatten.table, Unflatten.measuring):
        yield from table.values()
