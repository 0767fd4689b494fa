"""What a program does with one piece of a message: copy it with a cast, or reduce the ranks' pieces into it.

Aligned pieces go in blocks whose mask is bounded by a multiple of 16 elements, which the compiler is told: it then
keeps 128-bit accesses under the mask. At most 15 elements are left, for one narrow block. Unaligned pieces go in
narrow blocks throughout. Positions are int64 from an address; only offsets in a block are int32.

What peers wrote is read with `.cg`; `_signals` says why.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import combine_group, finish
from fastcoll.kernels._dtypes import narrow, widen

__all__ = ["GROUP", "NARROW", "REST", "copy_piece", "pointer", "reduce_piece", "whole"]

GROUP = tl.constexpr(4)
"""Peers whose blocks are in flight at a time."""

REST = tl.constexpr(16)
"""Elements of the block that takes what is left of an aligned piece."""

NARROW = tl.constexpr(4)
"""How many times smaller a block of an unaligned piece is: each of its elements takes an access."""


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns `address` (in bytes) as a pointer; ALIGNED promises a multiple of 16."""
    result = address.to(tl.int64).to(tl.pointer_type(TYPE))
    if ALIGNED:
        result = tl.multiple_of(result, 16)
    return result


@triton.jit
def whole(length):
    """Returns the largest multiple of 16 in `length`, and lets the compiler know that it is one."""
    return tl.multiple_of(length // REST * REST, 16)


@triton.jit
def _copy_block(
    source, target, start, length,
    TYPE: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    there = at < length
    value = tl.load(source + at, mask=there, cache_modifier=".cg")
    if value.dtype != TYPE:
        value = narrow(widen(value, value.dtype, ACCUMULATE), TYPE)
    tl.store(target + at, value, mask=there)


@triton.jit
def copy_piece(
    source, target, length,
    TYPE: tl.constexpr, ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies `length` elements to `target`, whose dtype is TYPE."""
    if ALIGNED:
        most = whole(length)
        for start in range(0, most, BLOCK):
            _copy_block(source, target, start, most, TYPE, ACCUMULATE, BLOCK)
        if most < length:
            _copy_block(source, target, most, length, TYPE, ACCUMULATE, REST)
    else:
        for start in range(0, length, BLOCK // NARROW):
            _copy_block(source, target, start, length, TYPE, ACCUMULATE, BLOCK // NARROW)


@triton.jit
def _load_of(addresses, peer, world, offset, at, there, WIRE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(addresses + tl.minimum(peer, world - 1)) + offset
    return tl.load(
        pointer(address, WIRE, ALIGNED) + at,
        mask=there & (peer < world),
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def _reduce_block(
    addresses, world, offset, start, length, op, scale, average, shared, out,
    SHARE: tl.constexpr, WIRE: tl.constexpr, MESSAGE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    there = at < length
    zero = tl.zeros([], tl.int32)
    own = _load_of(addresses, zero, world, offset, at, there, WIRE, ALIGNED)
    value = widen(own, WIRE, ACCUMULATE)
    for first in range(1, world, GROUP):
        one = _load_of(addresses, first, world, offset, at, there, WIRE, ALIGNED)
        two = _load_of(addresses, first + 1, world, offset, at, there, WIRE, ALIGNED)
        three = _load_of(addresses, first + 2, world, offset, at, there, WIRE, ALIGNED)
        four = _load_of(addresses, first + 3, world, offset, at, there, WIRE, ALIGNED)
        value = combine_group(
            value,
            widen(one, WIRE, ACCUMULATE),
            widen(two, WIRE, ACCUMULATE),
            widen(three, WIRE, ACCUMULATE),
            widen(four, WIRE, ACCUMULATE),
            world - first,
            op,
        )
    result = narrow(finish(value, scale, average), WIRE)
    if SHARE:
        tl.store(shared + at, result, mask=there)
    if WIRE != MESSAGE:
        result = narrow(widen(result, WIRE, ACCUMULATE), MESSAGE)
    tl.store(out + at, result, mask=there)


@triton.jit
def reduce_piece(
    addresses, world, offset, length, op, scale, average, shared, out,
    SHARE: tl.constexpr, WIRE: tl.constexpr, MESSAGE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduces `length` elements of all ranks in rank order and rounds the scaled result once, to WIRE.

    `addresses` points to an address per rank, `offset` bytes behind which lies that rank's piece, of WIRE. The
    result goes to `out`, of MESSAGE, and if SHARE to `shared`, of WIRE, as well. `scale` is a scalar of ACCUMULATE,
    `average` of float64. ALIGNED says that pieces, `shared` and `out` start at multiples of 16 bytes.
    """
    if ALIGNED:
        most = whole(length)
        for start in range(0, most, BLOCK):
            _reduce_block(
                addresses, world, offset, start, most, op, scale, average, shared, out,
                SHARE, WIRE, MESSAGE, ACCUMULATE, True, BLOCK,
            )  # fmt: skip
        if most < length:
            _reduce_block(
                addresses, world, offset, most, length, op, scale, average, shared, out,
                SHARE, WIRE, MESSAGE, ACCUMULATE, True, REST,
            )  # fmt: skip
    else:
        for start in range(0, length, BLOCK // NARROW):
            _reduce_block(
                addresses, world, offset, start, length, op, scale, average, shared, out,
                SHARE, WIRE, MESSAGE, ACCUMULATE, False, BLOCK // NARROW,
            )  # fmt: skip
