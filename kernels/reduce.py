"""Reduce: k flat buffers into one, element by element, by the tree of ``reduce_piece``, rounded once.

    out[i] = cast(scale * (in[0][i] + in[1][i] + ... + in[k-1][i]))         SUM; AVG: then divided by k
    PREMUL_SUM: each input is multiplied by its factor before, and rounded to the accumulate dtype

Accumulates in float32, and float64 in float64.

Bytes: elements * (k + 1) * itemsize, and 8 k bytes of addresses for each block.
Bound: the bandwidth of device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from fastcoll.buckets import address_table
from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import (
    OPTIONS,
    REGISTERS,
    Configuration,
    block_of,
    configuration_of,
    double_bits,
)
from fastcoll.kernels._dtypes import ELEMENT, accumulate_dtype, addressed, dtype_name
from fastcoll.kernels._launch import Launch, prepared
from fastcoll.kernels._pieces import SPAN, reduce_piece

__all__ = ["MOST_INPUTS", "configurations", "prepare_reduce", "reduce_kernel"]

_SPANS = (SPAN.value, 1024)
"""Largest blocks that are summed by the tree: of few inputs, of many."""

MOST_INPUTS = 3 * _SPANS[-1]
"""So many inputs are summed by the tree; of more, the blocks of 1024 are added in order."""


@triton.jit
def reduce_kernel(
    inputs, count, output, elements, scale_bits, divisor, factors,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Reduces one block. `inputs` is the address of the inputs' addresses."""
    inputs = addressed(inputs, tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start * (TYPE.primitive_bitwidth // 8)
    target = output.to(tl.int64) + offset
    addresses = target
    for index in range(count):
        addresses |= tl.load(inputs + index)
    reduce_piece(
        inputs, count, offset, tl.minimum(elements.to(tl.int64) - start, BLOCK),
        (addresses % 16 == 0).to(tl.int32), factor_of(scale_bits, accumulate_dtype(TYPE)),
        averager(divisor), target, target, False, TYPE, TYPE, BLOCK,
        SPAN, factors,
    )  # fmt: skip


def _block(dtype: torch.dtype, span: int) -> int:
    """Returns the elements of a program. Each level of the tree keeps a value of each, so many levels have fewer."""
    return block_of(dtype, dtype) // (1 if span == _SPANS[0] else 2)


_TABLE = {
    (dtype, span): configuration_of(
        f"reduce {dtype_name(dtype)}" + ("" if span == _SPANS[0] else " of many"),
        reduce_kernel,
        options=OPTIONS if span == _SPANS[0] else {**OPTIONS, "maxnreg": 2 * REGISTERS - 1},
        TYPE=ELEMENT[dtype],
        BLOCK=_block(dtype, span),
        SPAN=span,
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for span in _SPANS
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
    factors: int = 0,
    **places: int,
) -> Launch:
    """Returns a launch that can be repeated.

    Args:
        inputs: Addresses of the buffers, at least one.
        output: Address of the result; may be an input's address.
        elements: Elements of each buffer.
        dtype: Dtype of all buffers: float64, float32, bfloat16 or float16.
        device: Device of all buffers.
        op: SUM, AVG or PREMUL_SUM. AVG is the scaled sum divided by the number of inputs, a true quotient.
        scale: Factor of the sum.
        factors: Address of a float64 for each input, for PREMUL_SUM; 0: none.
        places: What a plan replaces for each call; see ``CUDA.Launch``.

    Raises:
        ValueError: Kernels cannot run on that device.
    """
    table = address_table(inputs, device)
    divisor = len(inputs) if op == "AVG" else 1
    span = _SPANS[0] if len(inputs) <= 3 * _SPANS[0] else _SPANS[-1]
    arguments = (
        *(table.data_ptr(), len(inputs), output, elements),
        *(double_bits(scale), divisor, factors),
    )
    programs = -(-elements // _block(dtype, span))
    return prepared(_TABLE[dtype, span], device, programs, arguments, table, **places)
