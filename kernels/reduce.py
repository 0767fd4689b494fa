"""Reduce: k inputs element by element into one output, in input order, rounded once.

    out[i] = cast(scale * (in[0][i] + in[1][i] + ... + in[k-1][i]))         SUM; AVG: then divided by k

Inputs are given by a table of addresses: buffers of this process, or of peers mapped into it. Each side is
a flat bucket or tensors scattered in memory, so that flatten and unflatten need no pass of their own.
Accumulates in float32.

Bytes: elements * (k + 1) * itemsize, and 16 (k + 1) bytes of tables for each block of
4096 elements. Bound: the bandwidth of device memory, or of the links to the peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import AddressTable, BucketLayout
from fastcoll.kernels._arithmetic import averager, finish
from fastcoll.kernels._blocks import (
    ALL_INTEGERS,
    element_address,
    is_wide,
    load,
    locate,
    scale_factor,
    store,
)
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import accumulate_dtype, addressed, dtype_name
from fastcoll.kernels._plan import (
    DEFAULT_BLOCKING,
    Blocking,
    Plan,
    configuration_of,
    constexprs,
    signature_of,
)
from fastcoll.kernels._prepared import PreparedLaunch
from fastcoll.kernels._sides import Flat, Scattered, require_apart, require_no_overlap
from fastcoll.kernels._statistics import Statistics, flags_of, record, squares_of

__all__ = ["OPS", "Reduce", "configurations", "reduce_kernel"]

OPS = ("SUM", "AVG")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_REGISTERS = {torch.float16: {"maxnreg": 80}}
"""Where the assembler of Triton 3.8, left to itself, aims for 64 and spills."""


@triton.jit
def _input_address(bases, rows, row_length, index, tensor, start, INPUT: tl.constexpr):
    base = tl.load(addressed(bases, tl.int64) + index)
    row = rows.to(tl.int64) + index * row_length.to(tl.int64) * 8
    return element_address(base, row, tensor, start, INPUT)


@triton.jit
def _total(
    bases,
    rows,
    row_length,
    count,
    tensor,
    start,
    left,
    INPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
):
    address = _input_address(bases, rows, row_length, 0, tensor, start, INPUT)
    total = load(address, left, INPUT, ACCUMULATE, LANES, WIDE)
    for index in range(1, count):
        address = _input_address(bases, rows, row_length, index, tensor, start, INPUT)
        total += load(address, left, INPUT, ACCUMULATE, LANES, WIDE)
    return total


@triton.jit(do_not_specialize=ALL_INTEGERS)
def reduce_kernel(
    block_map,
    sizes,
    count,
    input_bases,
    input_rows,
    input_row_length,
    output_base,
    output_row,
    scale_bits,
    scale_address,
    divisor,
    statistics,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Reduces one block. All arguments are int64: addresses of tables and scalars, counts."""
    tensor, start, left = locate(block_map, sizes, BLOCK)
    target = element_address(output_base.to(tl.int64), output_row, tensor, start, OUTPUT)
    factor = scale_factor(scale_bits, scale_address, ACCUMULATE)
    average = averager(divisor, ACCUMULATE)
    addresses = target
    for index in range(count):
        addresses |= _input_address(
            input_bases, input_rows, input_row_length, index, tensor, start, INPUT
        )
    sum_of_squares = 0.0
    flag = 0.0
    if is_wide(addresses, left, BLOCK):
        values = _total(
            input_bases,
            input_rows,
            input_row_length,
            count,
            tensor,
            start,
            left,
            INPUT,
            ACCUMULATE,
            BLOCK,
            True,
        )
        values = finish(values, factor, average)
        stored = store(target, left, values, OUTPUT, BLOCK, True)
        if statistics != 0:
            sum_of_squares = tl.sum(squares_of(values), axis=0)
            flag = tl.max(flags_of(values, stored, OUTPUT), axis=0)
    else:
        squares = tl.zeros([NARROW], tl.float32)
        flags = tl.zeros([NARROW], tl.float32)
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            there = left - first
            values = _total(
                input_bases,
                input_rows,
                input_row_length,
                count,
                tensor,
                start + first,
                there,
                INPUT,
                ACCUMULATE,
                NARROW,
                False,
            )
            values = finish(values, factor, average)
            to = target + first * (OUTPUT.primitive_bitwidth // 8)
            stored = store(to, there, values, OUTPUT, NARROW, False)
            inside = tl.arange(0, NARROW) < there
            squares += tl.where(inside, squares_of(values), 0.0)
            flags = tl.maximum(flags, tl.where(inside, flags_of(values, stored, OUTPUT), 0.0))
        if statistics != 0:
            sum_of_squares = tl.sum(squares, axis=0)
            flag = tl.max(flags, axis=0)
    if statistics != 0:
        record(statistics, sum_of_squares, flag)


@lru_cache(maxsize=8)
def _table(blocking: Blocking) -> Mapping[tuple[object, ...], Configuration]:
    return {
        (dtype,): Configuration(
            name=f"reduce {dtype_name(dtype)}",
            kernel=reduce_kernel,
            signature=signature_of(reduce_kernel),
            constexprs=constexprs(blocking, dtype, dtype),
            num_warps=blocking.warps,
            options={"enable_fp_fusion": False, **_REGISTERS.get(dtype, {})},
        )
        for dtype in _DTYPES
    }


def configurations() -> Iterator[Configuration]:
    """Yields all that :class:`Reduce` can launch."""
    yield from _table(DEFAULT_BLOCKING).values()


class Reduce(Plan):
    """Reduces k buckets, or k lists of tensors, of one layout.

    Args:
        layout: Of each input and of the output; ``BucketLayout([n])`` for plain buffers of n elements.
        inputs: How many, at least 1.
        dtype: Of inputs and output: float32, bfloat16 or float16.
        device: Of all tensors.
        op: SUM or AVG. AVG is the scaled sum, truly divided by `inputs`.
        blocking: How much a program does.

    Raises:
        TypeError: There is no kernel for this dtype.
        ValueError: `inputs` or `op` is none, or kernels cannot run on that device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device | str,
        op: str = "SUM",
        blocking: Blocking = DEFAULT_BLOCKING,
    ) -> None:
        if inputs < 1:
            raise ValueError(f"inputs: expected at least 1, got {inputs}.")
        if op not in OPS:
            raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op}.")
        configuration = configuration_of(_table(blocking), (dtype,), "Reduce")
        super().__init__(layout, configuration, accumulate_dtype(dtype), device, blocking)
        self.inputs = inputs
        self.op = op
        self._flat_inputs = Flat(layout, dtype, self.device)
        self._lists = Scattered(layout, dtype, self.device)
        self._flat_output = Flat(layout, dtype, self.device)
        self._targets = Scattered(layout, dtype, self.device)
        self._bases = AddressTable(self.device)
        self._itemsize = dtype.itemsize

    def prepare(
        self,
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]] | Sequence[int],
        output: Tensor | Sequence[Tensor],
        scale: float | Tensor = 1.0,
        statistics: Statistics | None = None,
    ) -> PreparedLaunch:
        """Returns a launch that can be repeated as long as the tensors lie where they are.

        Args:
            inputs: Flat buckets, or addresses of such that the device can read (peers' mapped memory; not
                checked), or lists of tensors.
            output: A flat bucket, or a list of tensors, each dense, none overlapping another.
            scale: Factor; a float32 scalar on the device (float64 for float64) is read when the kernel runs.
            statistics: Where norm and finiteness of the results go, or None.

        Raises:
            TypeError: A dtype is not the plan's.
            ValueError: Tensors do not fit the layout, are elsewhere, or the output overlaps an input other
                than by being exactly one.
        """
        if len(inputs) != self.inputs:
            raise ValueError(f"inputs: expected {self.inputs}, got {len(inputs)}.")
        sources, bases, rows, row_length = self._read(inputs)
        targets, base, row = self._written(output)
        written = (targets, self._itemsize)
        for index, source in enumerate(sources):
            read = (source, self._itemsize)
            require_no_overlap(self.layout.sizes, written, read, f"inputs[{index}]")
        bits, address = self._scale(scale)
        arguments = (
            self.inputs,
            bases.data_ptr(),
            rows if isinstance(rows, int) else rows.data_ptr(),
            row_length,
            base,
            row if isinstance(row, int) else row.data_ptr(),
            bits,
            address,
            self.inputs if self.op == "AVG" else 1,
            self._statistics(statistics),
        )
        return self._prepared(arguments, statistics, bases, rows, row)

    def _read(
        self, inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]] | Sequence[int]
    ) -> tuple[list[list[int]], Tensor, Tensor | int, int]:
        """Returns the addresses of each input's tensors, table of bases, table of rows, a row's length."""
        if isinstance(inputs[0], (Tensor, int)):
            bases = [
                item if isinstance(item, int) else self._flat_inputs.base(item, f"inputs[{index}]")
                for index, item in enumerate(cast(Sequence[Tensor | int], inputs))
            ]
            sources = [self._flat_inputs.addresses(base) for base in bases]
            return sources, self._bases.refresh(bases), self._flat_inputs.row, 0
        lists = cast(Sequence[Sequence[Tensor]], inputs)
        rows, addresses = self._lists.rows(lists, "inputs")
        length = len(self.layout.sizes)
        sources = [addresses[index * length :][:length] for index in range(self.inputs)]
        return sources, self._bases.refresh([0] * self.inputs), rows, length

    def _written(self, output: Tensor | Sequence[Tensor]) -> tuple[list[int], int, Tensor | int]:
        """Returns the address of each tensor, the base, and the row of addresses."""
        if isinstance(output, Tensor):
            base = self._flat_output.base(output, "output")
            return self._flat_output.addresses(base), base, self._flat_output.row
        row, addresses = self._targets.rows([output], "output")
        require_apart(self.layout.sizes, addresses, self._itemsize, "output")
        return addresses, 0, row

    def __call__(
        self,
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]] | Sequence[int],
        output: Tensor | Sequence[Tensor],
        scale: float | Tensor = 1.0,
        statistics: Statistics | None = None,
    ) -> None:
        """Launches on the current stream; arguments and errors are those of :meth:`prepare`."""
        self.prepare(inputs, output, scale, statistics)()
