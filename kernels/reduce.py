"""Reduce: k flat buffers into one, element by element, in input order, rounded once.

    out[i] = cast(scale * (in[0][i] + in[1][i] + ... + in[k-1][i]))         SUM; AVG: then divided by k

Accumulates in float32.

Bytes: elements * (k + 1) * itemsize, and 8 k bytes of addresses for each block of 2048 elements.
Bound: the bandwidth of device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fastcoll.buckets import address_table
from fastcoll.kernels._arithmetic import averager, factor_of, finish
from fastcoll.kernels._blocks import is_wide, load, store
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import addressed, dtype_name
from fastcoll.kernels._launch import prepared
from fastcoll.kernels._plan import BLOCK, block_configuration, double_bits

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = ["configurations", "prepare_reduce", "reduce_kernel"]

_REGISTERS = {torch.float16: {"maxnreg": 80}}
"""Without this limit the assembler of Triton 3.8 aims for 64 registers and spills."""


@triton.jit
def _total(
    inputs, count, offset, left,
    INPUT: tl.constexpr, ACCUMULATE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    total = load(tl.load(inputs) + offset, left, INPUT, ACCUMULATE, LANES, WIDE)
    for index in range(1, count):
        total += load(tl.load(inputs + index) + offset, left, INPUT, ACCUMULATE, LANES, WIDE)
    return total


@triton.jit
def reduce_kernel(
    inputs, count, output, elements, scale_bits, divisor,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Reduces one block. All arguments are int64; `inputs` is the address of the inputs' addresses."""
    inputs = addressed(inputs, tl.int64)
    size: tl.constexpr = INPUT.primitive_bitwidth // 8
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = elements.to(tl.int64) - start
    offset = start * size
    target = output.to(tl.int64) + offset
    factor = factor_of(scale_bits, ACCUMULATE)
    average = averager(divisor)
    addresses = target
    for index in range(count):
        addresses |= tl.load(inputs + index)
    if is_wide(addresses, left, BLOCK):
        total = _total(inputs, count, offset, left, INPUT, ACCUMULATE, BLOCK, True)
        store(target, left, finish(total, factor, average), OUTPUT, BLOCK, True)
    else:
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            there = left - first
            begin = first * size
            total = _total(
                inputs, count, offset + begin, there, INPUT, ACCUMULATE, NARROW, False
            )  # fmt: skip
            store(target + begin, there, finish(total, factor, average), OUTPUT, NARROW, False)


_TABLE = {
    dtype: block_configuration(
        f"reduce {dtype_name(dtype)}", reduce_kernel, dtype, dtype, **_REGISTERS.get(dtype, {})
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``prepare_reduce`` can launch."""
    yield from _TABLE.values()


def prepare_reduce(
    inputs: Sequence[int],
    output: int,
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    op: str = "SUM",
    scale: float = 1.0,
) -> CUDA.Launch:
    """Returns a launch that can be repeated.

    Args:
        inputs: Addresses of the buffers, at least one.
        output: Address of the result; may be an input's address.
        elements: Elements of each buffer.
        dtype: Dtype of all buffers: float32, bfloat16 or float16.
        device: Device of all buffers.
        op: SUM or AVG. AVG is the scaled sum divided by the number of inputs, a true quotient.
        scale: Factor.

    Raises:
        ValueError: Kernels cannot run on that device.
    """
    table = address_table(inputs, device)
    divisor = len(inputs) if op == "AVG" else 1
    arguments = (table.data_ptr(), len(inputs), output, elements, double_bits(scale), divisor)
    programs = -(-elements // BLOCK)
    return prepared(_TABLE[dtype], device, programs, arguments, table)
