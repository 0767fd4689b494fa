"""Element types inside a kernel: those of loads and stores, and those of arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "ELEMENT",
    "INTERPRETED",
    "PAIRS",
    "accumulate_dtype",
    "addressed",
    "dtype_name",
    "narrow",
    "types_of",
    "widen",
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter truncates float32 to bfloat16 where a GPU rounds, and has no subnormal bfloat16."""

ELEMENT = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""Triton's type of each dtype that the kernels support."""

PAIRS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
"""Pairs of message dtype and wire dtype that are summed; the sums are in float32."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def types_of(first: torch.dtype, second: torch.dtype) -> str:
    """Returns two dtypes as text, in the form of the compile table's rows."""
    return dtype_name(first) + (f"->{dtype_name(second)}" if second != first else "")


@triton.jit
def addressed(address, TYPE: tl.constexpr, DIVISOR: tl.constexpr = 1):
    """Returns the pointer to elements of TYPE at an address, a multiple of DIVISOR."""
    # Triton keeps a value's known divisors with the operation that makes it, so a caller cannot add them.
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(TYPE)), DIVISOR)


@triton.constexpr_function
def accumulate_dtype(TYPE):
    """Returns the dtype in which elements of TYPE are added."""
    return tl.float64 if tl.float64 == TYPE else tl.float32


@triton.jit
def _float32_to_bfloat16(value):
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen(stored, TYPE: tl.constexpr, TO: tl.constexpr):
    """Returns loaded elements of TYPE in the accumulate dtype TO; exact."""
    if (tl.bfloat16 == TYPE) and INTERPRETED:
        bits = stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(TO)
    else:
        return stored.to(TO)


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """Returns values rounded to TYPE, to nearest even."""
    if (tl.bfloat16 == TYPE) and INTERPRETED:
        return _float32_to_bfloat16(value.to(tl.float32))
    else:
        return value.to(TYPE)
