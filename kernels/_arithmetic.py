"""Arithmetic of a reduction, in the accumulate dtype: scaling and averaging the sum."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["averager", "factor_of", "finish"]


@triton.jit
def factor_of(bits, TO: tl.constexpr):
    """Returns the float64 with these bits, as TO. A float argument of a kernel would always be float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(TO)


@triton.jit
def averager(divisor):
    """Returns the `average` of ``finish``: the divisor's reciprocal, a float64 scalar, made once a program."""
    return 1.0 / divisor.to(tl.float64)


@triton.jit
def finish(value, scale, average):
    """Returns `value` times `scale`, then divided by the divisor of `average`, both rounded by IEEE 754.

    A true quotient: averages have the bits of the CPU backend. With a divisor above 97, subnormal float32 averages may
    be one step off.
    """
    result = value * scale
    if value.dtype == tl.float64:
        # The divisor is a small integer, which its rounded reciprocal still determines.
        result = result / tl.floor(1.0 / average + 0.5)
    elif average != 1.0:
        # A quotient by an integer lies exactly on the midpoint of two float32 or far from it, so the reciprocal's
        # float64 error never moves it across. Only subnormal quotients lie on a midpoint; the product is then exact
        # for divisors up to 97. A float32 division would be a function call, which spills registers.
        result = (result.to(tl.float64) * average).to(tl.float32)
    return result
