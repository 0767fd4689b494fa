"""Reduce: k flat buffers into one, element by element, by the tree of ``reduce_piece``, rounded once.

    out[i] = cast(scale * (in[0][i] + in[1][i] + ... + in[k-1][i]))         SUM; AVG: then divided by k

Accumulates in float32.

Bytes: elements * (k + 1) * itemsize, and 8 k bytes of addresses for each block.
Bound: the bandwidth of device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fastcoll.buckets import address_table
from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, addressed, dtype_name
from fastcoll.kernels._launch import prepared
from fastcoll.kernels._peer_launch import OPTIONS, WARPS, block_of, signature_of
from fastcoll.kernels._pieces import reduce_piece
from fastcoll.kernels._plan import double_bits

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = ["configurations", "prepare_reduce", "reduce_kernel"]


@triton.jit
def reduce_kernel(
    inputs, count, output, elements, scale_bits, divisor,
    TYPE: tl.constexpr, BLOCK: tl.constexpr,
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
        (addresses % 16 == 0).to(tl.int32), factor_of(scale_bits, tl.float32), averager(divisor),
        target, target, False, TYPE, TYPE, BLOCK,
    )  # fmt: skip


_TABLE = {
    dtype: Configuration(
        name=f"reduce {dtype_name(dtype)}",
        kernel=reduce_kernel,
        signature=signature_of(reduce_kernel),
        constexprs={"TYPE": ELEMENT[dtype], "BLOCK": block_of(dtype, dtype)},
        num_warps=WARPS,
        options=OPTIONS,
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
    **places: int,
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
        places: What a plan replaces for each call; see ``CUDA.Launch``.

    Raises:
        ValueError: Kernels cannot run on that device.
    """
    table = address_table(inputs, device)
    divisor = len(inputs) if op == "AVG" else 1
    arguments = (table.data_ptr(), len(inputs), output, elements, double_bits(scale), divisor)
    programs = -(-elements // block_of(dtype, dtype))
    return prepared(_TABLE[dtype], device, programs, arguments, table, **places)
