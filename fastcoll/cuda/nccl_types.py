"""How torch's dtypes and reductions are called by NCCL.

The numbers are those of NCCL's public header. A complex number goes as two floats, a bool as a byte of 0 or
1; what NCCL has no type for can be moved, as bytes, and not reduced.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

__all__ = ["AVG", "PREMUL_SUM", "REDUCTIONS", "TYPES", "Reduction", "WireType", "moved", "reduced"]

PREMUL_SUM = -1
"""In place of an operation's number: one must be made for the factor."""


AVG = 4
"""NCCL's number of the average; those of the sums with a factor, which are made, lie beyond."""


class WireType(NamedTuple):
    """What travels for one element.

    Attributes:
        code: NCCL's number of the type.
        parts: Elements of that type for one of the tensor's.
    """

    code: int
    parts: int


class Reduction(NamedTuple):
    """A reduction of a dtype.

    Attributes:
        code: NCCL's number of the type.
        parts: Elements of that type for one of the tensor's.
        op: NCCL's number of the operation, or :data:`PREMUL_SUM`.
    """

    code: int
    parts: int
    op: int


_UINT8 = 1
_SUM, _PROD, _MAX, _MIN = range(AVG)

TYPES: dict[torch.dtype, WireType] = {
    torch.int8: WireType(0, 1),
    torch.uint8: WireType(_UINT8, 1),
    torch.bool: WireType(_UINT8, 1),
    torch.int32: WireType(2, 1),
    torch.uint32: WireType(3, 1),
    torch.int64: WireType(4, 1),
    torch.uint64: WireType(5, 1),
    torch.float16: WireType(6, 1),
    torch.complex32: WireType(6, 2),
    torch.float32: WireType(7, 1),
    torch.complex64: WireType(7, 2),
    torch.float64: WireType(8, 1),
    torch.complex128: WireType(8, 2),
    torch.bfloat16: WireType(9, 1),
    torch.float8_e4m3fn: WireType(10, 1),
    torch.float8_e5m2: WireType(11, 1),
}

REDUCTIONS: dict[ReduceOp.RedOpType, int] = {
    ReduceOp.SUM: _SUM,
    ReduceOp.PRODUCT: _PROD,
    ReduceOp.MAX: _MAX,
    ReduceOp.MIN: _MIN,
    ReduceOp.AVG: AVG,
    ReduceOp.PREMUL_SUM: PREMUL_SUM,
}

# "Or" and "and", as torch does it: of bytes that are 0 or 1.
_OF_BOOLS: dict[ReduceOp.RedOpType, int] = {
    ReduceOp.SUM: _MAX,
    ReduceOp.PRODUCT: _MIN,
    ReduceOp.MAX: _MAX,
    ReduceOp.MIN: _MIN,
    ReduceOp.BOR: _MAX,
    ReduceOp.BAND: _MIN,
}

_LINEAR = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


@functools.cache
def moved(dtype: torch.dtype) -> WireType:
    """Returns how elements travel that nobody computes with; any dtype does."""
    return TYPES.get(dtype) or WireType(_UINT8, dtype.itemsize)


@functools.cache
def reduced(dtype: torch.dtype, op: ReduceOp.RedOpType) -> Reduction:
    """Returns how NCCL reduces.

    Raises:
        TypeError: NCCL does not reduce this dtype, or not by this operation; the message says what to do.
    """
    wire = TYPES.get(dtype)
    if wire is None:
        raise TypeError(
            f"expected a dtype that NCCL reduces, got {dtype}. Convert the tensor to a wider dtype first."
        )
    table = _OF_BOOLS if dtype == torch.bool else REDUCTIONS
    number = table.get(op)
    if number is None or (dtype.is_complex and op not in _LINEAR):
        known = ", ".join(one.name for one in table if not dtype.is_complex or one in _LINEAR)
        raise TypeError(
            f"expected an operation that NCCL has for {dtype} ({known}), got {op.name}. "
            "Use one of these, or gather the tensors and reduce them with torch."
        )
    if number == PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"expected a floating-point or complex dtype for PREMUL_SUM, got {dtype}. Use SUM."
        )
    return Reduction(wire.code, wire.parts, number)
