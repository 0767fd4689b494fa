"""Element types inside a kernel: what is loaded and stored, and what arithmetic is done in.

fp8 is converted by integer arithmetic: the hardware's instructions exist from sm_89 on only, and saturate
e5m2 too. Bits are the same on every target and in the interpreter: rounded to nearest even; what is too
large becomes 448 in e4m3, which has no infinity, and infinity in e5m2, as torch 2.13 has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "ELEMENT",
    "INTERPRETED",
    "accumulate_dtype",
    "addressed",
    "dtype_name",
    "narrow",
    "widen",
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds, and has no subnormal bfloat16."""

ELEMENT = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
"""Triton's name of each dtype that the kernels take."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what elements of `dtype` are summed and scaled in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@triton.jit
def addressed(address, TYPE: tl.constexpr, DIVISOR: tl.constexpr = 1):
    """Returns the pointer to elements of TYPE at an address, a multiple of DIVISOR; fp8 elements are bytes."""
    # What is known of a value's divisors is kept by the operation that makes it, hence not by a caller.
    if (tl.float8e4nv == TYPE) or (tl.float8e5 == TYPE):
        return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint8)), DIVISOR)
    else:
        return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(TYPE)), DIVISOR)


@triton.jit
def _fp8_code(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Returns the code of float32 numbers given by their bits without sign, as if no exponent were too large."""
    # Below the smallest normal number: adding the number whose last bit is worth as much as the smallest
    # subnormal one rounds, to nearest even, to a multiple of that.
    shift: tl.constexpr = 23 - MANTISSA
    magic: tl.constexpr = 127 + 24 - BIAS - MANTISSA
    small = bits.to(tl.float32, bitcast=True) + 2.0 ** (magic - 127)
    small = small.to(tl.uint32, bitcast=True) - (magic << 23)
    odd = (bits >> shift) & 1
    normal = (bits - ((127 - BIAS) << 23) + ((1 << (shift - 1)) - 1) + odd) >> shift
    return tl.where(bits < ((128 - BIAS) << 23), small, normal)


@triton.jit
def _float32_to_e4m3(value):
    bits = value.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    bits = bits ^ sign
    code = _fp8_code(bits, 3, 7)
    code = tl.where(bits > (1086 << 20), 0x7E, code)  # 448 is the largest
    code = tl.where(bits > 0x7F800000, 0x7F, code)  # NaN
    return (code | (sign >> 24)).to(tl.uint8)


@triton.jit
def _float32_to_e5m2(value):
    bits = value.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    bits = bits ^ sign
    code = _fp8_code(bits, 2, 15)
    large = tl.where(bits > 0x7F800000, 0x7F, 0x7C)  # NaN, infinity
    code = tl.where(bits >= (143 << 23), large, code)
    return (code | (sign >> 24)).to(tl.uint8)


@triton.jit
def _e4m3_to_float32(code):
    code = code.to(tl.uint32)
    magnitude = code & 0x7F
    # The exponent moved into float32's place is 120 too small; one product mends it, denormals too.
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _e5m2_to_float32(code):
    # e5m2 is float16 without its last eight bits.
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bfloat16_to_float32(value):
    return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _float32_to_bfloat16(value):
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen(stored, TYPE: tl.constexpr, TO: tl.constexpr):
    """Returns loaded elements of TYPE in the accumulate dtype TO; exact."""
    if tl.float8e4nv == TYPE:
        return _e4m3_to_float32(stored).to(TO)
    elif tl.float8e5 == TYPE:
        return _e5m2_to_float32(stored).to(TO)
    elif (tl.bfloat16 == TYPE) and INTERPRETED:
        return _bfloat16_to_float32(stored).to(TO)
    else:
        return stored.to(TO)


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """Returns values rounded, to nearest even, to what is stored for elements of TYPE."""
    if tl.float8e4nv == TYPE:
        return _float32_to_e4m3(value.to(tl.float32))
    elif tl.float8e5 == TYPE:
        return _float32_to_e5m2(value.to(tl.float32))
    elif (tl.bfloat16 == TYPE) and INTERPRETED:
        return _float32_to_bfloat16(value.to(tl.float32))
    else:
        return value.to(TYPE)
