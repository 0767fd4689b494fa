"""Arithmetic of a reduction: combining input elements, and scaling and averaging the result."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "MAX",
    "MIN",
    "OPERATIONS",
    "PRODUCT",
    "SUM",
    "averager",
    "combine",
    "combine_group",
    "factor_of",
    "finish",
]

SUM = tl.constexpr(0)
MIN = tl.constexpr(1)
MAX = tl.constexpr(2)
PRODUCT = tl.constexpr(3)

OPERATIONS = {"sum": 0, "avg": 0, "min": 1, "max": 2, "product": 3}
"""Number of each operation for kernels; an average is a sum divided by the number of inputs."""


@triton.jit
def _least(first, second):
    return tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _greatest(first, second):
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(first, second, op):
    """Returns `first` op `second`; NaN passes through MIN and MAX.

    For kernels between ranks `op` is a launch argument: a uniform branch costs less than another kernel for each
    operation. If `op` is a constant, the other branches are not compiled.
    """
    result = first
    if op == SUM:
        result = first + second
    elif op == MIN:
        result = _least(first, second)
    elif op == MAX:
        result = _greatest(first, second)
    else:
        result = first * second
    return result


@triton.jit
def combine_group(value, one, two, three, four, count, op):
    """Returns `value` op `one` op ... up to the `count`-th argument, in this order; `count` is at least 1."""
    result = value
    if op == SUM:
        result = result + one
        result = tl.where(count > 1, result + two, result)
        result = tl.where(count > 2, result + three, result)
        result = tl.where(count > 3, result + four, result)
    elif op == MIN:
        result = _least(result, one)
        result = tl.where(count > 1, _least(result, two), result)
        result = tl.where(count > 2, _least(result, three), result)
        result = tl.where(count > 3, _least(result, four), result)
    elif op == MAX:
        result = _greatest(result, one)
        result = tl.where(count > 1, _greatest(result, two), result)
        result = tl.where(count > 2, _greatest(result, three), result)
        result = tl.where(count > 3, _greatest(result, four), result)
    else:
        result = result * one
        result = tl.where(count > 1, result * two, result)
        result = tl.where(count > 2, result * three, result)
        result = tl.where(count > 3, result * four, result)
    return result


@triton.jit
def factor_of(bits, TO: tl.constexpr):
    """Returns the float64 with these bits, as TO. A float argument of a kernel would always be float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(TO)


@triton.jit
def averager(divisor, ACCUMULATE: tl.constexpr):
    """Returns the `average` of ``finish``: the divisor or its reciprocal, a float64 scalar, made once a program."""
    if tl.float64 == ACCUMULATE:
        return divisor.to(tl.float64)
    else:
        return 1.0 / divisor.to(tl.float64)


@triton.jit
def _averaged(value, average):
    if value.dtype == tl.float64:
        return value / average
    else:
        # A quotient by an integer lies exactly on the midpoint of two float32 or far from it, so the reciprocal's
        # float64 error never moves it across. Only subnormal quotients lie on a midpoint; the product is then exact
        # for divisors up to 97. A float32 division would be a function call, which spills registers.
        return (value.to(tl.float64) * average).to(tl.float32)


@triton.jit
def finish(value, scale, average):
    """Returns `value` times `scale`, then divided by the divisor of `average`, both rounded by IEEE 754.

    A true quotient: averages have the bits of the CPU backend. With a divisor above 97, subnormal float32 averages may
    be one step off.
    """
    result = value * scale
    if average != 1.0:
        result = _averaged(result, average)
    return result
