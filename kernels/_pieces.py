"""A program's work on one piece of a message: copy it with a cast, or reduce the ranks' pieces into it.

If all addresses of a piece are multiples of 16 bytes, it is processed in wide blocks. Their mask ends at a multiple of
16 elements, which the code declares to the compiler, so masked accesses keep 128 bits. The remaining elements, at most
15, take a narrow block; so does all of an unaligned piece. Pieces are passed as addresses, because the compiler keeps a
pointer's known divisors with the operation that makes it.

Memory that peers wrote is read with `.cg`; `_signals` explains why.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.buckets import GRAIN
from fastcoll.kernels._arithmetic import finish
from fastcoll.kernels._dtypes import accumulate_dtype, addressed, narrow, widen

__all__ = [
    "GRAIN_ELEMENTS",
    "GROUP",
    "NARROW",
    "SPAN",
    "as_mask",
    "copy_four",
    "copy_piece",
    "pointer",
    "reduce_piece",
    "whole",
]

GROUP = tl.constexpr(4)
"""Peers whose blocks are in flight at a time."""

SPAN = tl.constexpr(8)
"""Largest blocks of ranks that kernels between ranks sum first; these ranks share a host."""

GRAIN_ELEMENTS = tl.constexpr(GRAIN)
"""Wide blocks end at multiples of so many elements."""

NARROW = tl.constexpr(4)
"""How many times smaller a narrow block is, because each of its elements takes an access."""


@triton.jit
def pointer(address, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """Returns `address` (in bytes) as a pointer; WIDE promises a multiple of 16."""
    return addressed(address, TYPE, 16 if WIDE else 1)


@triton.jit
def whole(length, aligned):
    """Returns how many of `length` elements take wide blocks: none unless `aligned` (0 or 1)."""
    return tl.multiple_of(length // GRAIN_ELEMENTS * aligned * GRAIN_ELEMENTS, 16)


@triton.jit
def as_mask(condition):
    """Returns a mask for a condition of lanes and a scalar, such as ``there & sends``.

    The interpreter turns such a scalar into integers, and Triton 3.9's accepts no integer mask. It compiles to nothing.
    """
    return condition != 0


@triton.jit
def _copy_block(
    source, target, start, length,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    there = at < length
    value = tl.load(pointer(source, SOURCE, WIDE) + at, mask=there, cache_modifier=".cg")
    if SOURCE != TARGET:
        value = narrow(widen(value, SOURCE, tl.float32), TARGET)
    tl.store(pointer(target, TARGET, WIDE) + at, value, mask=there)


@triton.jit
def copy_piece(
    source, target, length, aligned,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies `length` elements between addresses; `aligned`: both are multiples of 16."""
    most = whole(length, aligned)
    for start in range(0, most, BLOCK):
        _copy_block(source, target, start, most, SOURCE, TARGET, True, BLOCK)
    for start in range(most, length, BLOCK // NARROW):
        _copy_block(source, target, start, length, SOURCE, TARGET, False, BLOCK // NARROW)


@triton.jit
def _load_wide(source, at, most, SOURCE: tl.constexpr):
    return tl.load(pointer(source, SOURCE, True) + at, mask=at < most, cache_modifier=".cg")


@triton.jit
def _store_wide(
    value, target, at, most,
    SOURCE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    if SOURCE != TARGET:
        value = narrow(widen(value, SOURCE, tl.float32), TARGET)
    tl.store(pointer(target, TARGET, True) + at, value, mask=at < most)


@triton.jit
def _copy_tail(
    source, target, most, length,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(most, length, BLOCK):
        _copy_block(source, target, start, length, SOURCE, TARGET, False, BLOCK)


@triton.jit
def copy_four(
    sources, targets, lengths, aligned,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies up to four pieces of different peers with their loads in flight together; each argument has four entries.

    Like ``copy_piece``; a piece without elements may have any addresses.
    """
    most0 = whole(lengths[0], aligned[0])
    most1 = whole(lengths[1], aligned[1])
    most2 = whole(lengths[2], aligned[2])
    most3 = whole(lengths[3], aligned[3])
    most = tl.maximum(tl.maximum(most0, most1), tl.maximum(most2, most3))
    for start in range(0, most, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value0 = _load_wide(sources[0], at, most0, SOURCE)
        value1 = _load_wide(sources[1], at, most1, SOURCE)
        value2 = _load_wide(sources[2], at, most2, SOURCE)
        value3 = _load_wide(sources[3], at, most3, SOURCE)
        _store_wide(value0, targets[0], at, most0, SOURCE, TARGET)
        _store_wide(value1, targets[1], at, most1, SOURCE, TARGET)
        _store_wide(value2, targets[2], at, most2, SOURCE, TARGET)
        _store_wide(value3, targets[3], at, most3, SOURCE, TARGET)
    tail: tl.constexpr = BLOCK // NARROW
    _copy_tail(sources[0], targets[0], most0, lengths[0], SOURCE, TARGET, tail)
    _copy_tail(sources[1], targets[1], most1, lengths[1], SOURCE, TARGET, tail)
    _copy_tail(sources[2], targets[2], most2, lengths[2], SOURCE, TARGET, tail)
    _copy_tail(sources[3], targets[3], most3, lengths[3], SOURCE, TARGET, tail)


@triton.jit
def _load_of(addresses, peer, world, offset, at, there, WIRE: tl.constexpr, WIDE: tl.constexpr):
    address = tl.load(addresses + tl.minimum(peer, world - 1)) + offset
    return tl.load(
        pointer(address, WIRE, WIDE) + at,
        mask=as_mask(there & (peer < world)),
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def _term(stored, peer, world, factors, WIRE: tl.constexpr):
    """Returns a rank's elements as terms of the sum: in the accumulate dtype, times the rank's factor if it has one."""
    value = widen(stored, WIRE, accumulate_dtype(WIRE))
    if factors is not None:
        there = (factors != 0) & (peer < world)
        factor = tl.load(addressed(factors, tl.float64) + peer, mask=as_mask(there), other=1.0)
        value = value * factor.to(value.dtype)
    return value


@triton.jit
def _sum_of_four(
    addresses, first, world, offset, at, there, factors, WIRE: tl.constexpr, WIDE: tl.constexpr
):
    """Returns (x_0 + x_1) + (x_2 + x_3) of four ranks from `first` on, without those that are not there."""
    one = _load_of(addresses, first, world, offset, at, there, WIRE, WIDE)
    two = _load_of(addresses, first + 1, world, offset, at, there, WIRE, WIDE)
    three = _load_of(addresses, first + 2, world, offset, at, there, WIRE, WIDE)
    four = _load_of(addresses, first + 3, world, offset, at, there, WIRE, WIDE)
    low = _term(one, first, world, factors, WIRE)
    low = tl.where(first + 1 < world, low + _term(two, first + 1, world, factors, WIRE), low)
    high = _term(three, first + 2, world, factors, WIRE)
    high = tl.where(first + 3 < world, high + _term(four, first + 3, world, factors, WIRE), high)
    return tl.where(first + 2 < world, low + high, low)


@triton.jit
def _sum_of(
    addresses, first, last, world, offset, at, there, factors,
    WIRE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the ranks `first` to `last` - 1, by the tree of csrc/reduce/reduce.hpp up to 3 SPAN ranks.

    That tree splits at the largest power of two below the number of ranks. So it first sums aligned blocks of 4, then
    of 8, and so on, up to SPAN. Blocks of SPAN are added in order, which is the tree for up to three of them.
    """
    if SPAN < GROUP:
        return _sum_of_four(addresses, first, world, offset, at, there, factors, WIRE, WIDE)
    else:
        value = tl.zeros([BLOCK], accumulate_dtype(WIRE))
        for block in range(first, last, SPAN):
            part = _sum_of(
                addresses, block, tl.minimum(block + SPAN, last), world, offset, at, there, factors,
                WIRE, WIDE, BLOCK, SPAN // 2,
            )  # fmt: skip
            value = tl.where(block == first, part, value + part)
        return value


@triton.jit
def _reduce_block(
    addresses, world, offset, start, length, scale, average, shared, out, factors,
    SHARE: tl.constexpr, WIRE: tl.constexpr, MESSAGE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, MEASURES: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    there = at < length
    value = _sum_of(addresses, 0, world, world, offset, at, there, factors, WIRE, WIDE, BLOCK, SPAN)
    result = narrow(finish(value, scale, average), WIRE)
    if SHARE:
        tl.store(pointer(shared, WIRE, WIDE) + at, result, mask=there)
    if WIRE != MESSAGE:
        result = narrow(widen(result, WIRE, tl.float32), MESSAGE)
    tl.store(pointer(out, MESSAGE, WIDE) + at, result, mask=there)
    if MEASURES:
        written = widen(result, MESSAGE, tl.float64)
        return tl.sum(written * written)  # 0 where `there` is false
    else:
        return tl.zeros([], tl.float64)


@triton.jit
def reduce_piece(
    addresses, world, offset, length, aligned, scale, average, shared, out,
    SHARE: tl.constexpr, WIRE: tl.constexpr, MESSAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr = SPAN, factors=None, MEASURES: tl.constexpr = False,
):  # fmt: skip
    """Sums `length` elements of all ranks by one tree and rounds the scaled result once, to WIRE.

    `addresses` points to one address per rank; that rank's piece, of dtype WIRE, begins `offset` bytes after it. The
    result goes to the address `out` as MESSAGE, and with SHARE also to `shared` as WIRE. `scale` is a scalar of the
    accumulate dtype, `average` a float64 scalar. `factors` is the address of the float64 by which each rank's elements
    are multiplied first, or 0. `aligned`: all pieces, `shared` and `out` are at multiples of 16 bytes. The tree is that
    of the CPU for up to 3 SPAN ranks. Returns the sum of the result's squares in float64 if MEASURES, else 0.
    """
    most = whole(length, aligned)
    square = tl.zeros([], tl.float64)
    for start in range(0, most, BLOCK):
        square += _reduce_block(
            addresses, world, offset, start, most, scale, average, shared, out, factors,
            SHARE, WIRE, MESSAGE, True, BLOCK, SPAN, MEASURES,
        )  # fmt: skip
    for start in range(most, length, BLOCK // NARROW):
        square += _reduce_block(
            addresses, world, offset, start, length, scale, average, shared, out, factors,
            SHARE, WIRE, MESSAGE, False, BLOCK // NARROW, SPAN, MEASURES,
        )  # fmt: skip
    return square
