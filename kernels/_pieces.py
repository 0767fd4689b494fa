"""What a program does with one piece of a message: copy it with a cast, or reduce the ranks' pieces into it.

All loops run over whole blocks without a mask, then once over the rest with one: a mask whose bound is not known to
be a multiple of 16 would split the 128-bit accesses of every block. Positions are int64 from an address; only
offsets in a block are int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import combine, finish, narrow, widen

__all__ = ["GROUP", "copy_piece", "pointer", "reduce_piece"]

GROUP = tl.constexpr(4)
"""Peers whose blocks are in flight at a time."""


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns `address` (in bytes) as a pointer; ALIGNED promises a multiple of 16."""
    result = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        result = tl.multiple_of(result, 16)
    return result


@triton.jit
def _copy_block(source, target, at, mask, TYPE: tl.constexpr, ACCUMULATE: tl.constexpr):
    value = tl.load(source + at, mask=mask, cache_modifier=".cg")
    if value.dtype != TYPE:
        value = narrow(widen(value, ACCUMULATE), TYPE)
    tl.store(target + at, value, mask=mask)


@triton.jit
def copy_piece(
    source, target, length, TYPE: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies `length` elements from `source` to `target`, whose dtype is TYPE."""
    at = tl.arange(0, BLOCK)
    blocks = length // BLOCK
    for block in range(0, blocks):
        start = block.to(tl.int64) * BLOCK
        _copy_block(source + start, target + start, at, None, TYPE, ACCUMULATE)
    start = blocks.to(tl.int64) * BLOCK
    rest = length - start
    if rest > 0:
        _copy_block(source + start, target + start, at, at < rest, TYPE, ACCUMULATE)


@triton.jit
def _load_of(
    addresses,
    peer,
    world,
    offset,
    at,
    mask,
    WIRE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    address = tl.load(addresses + tl.minimum(peer, world - 1)) + offset
    source = pointer(address, WIRE, ALIGNED)
    there = peer < world
    if mask is None:
        return tl.load(source + at, mask=there, other=0.0, cache_modifier=".cg")
    else:
        return tl.load(source + at, mask=there & mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _reduce_block(
    addresses,
    world,
    offset,
    at,
    mask,
    op,
    scale,
    divisor,
    shared,
    out,
    SHARE: tl.constexpr,
    WIRE: tl.constexpr,
    MESSAGE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    value = widen(
        _load_of(addresses, tl.zeros([], tl.int32), world, offset, at, mask, WIRE, ALIGNED),
        ACCUMULATE,
    )
    for first in range(1, world, GROUP):
        one = _load_of(addresses, first, world, offset, at, mask, WIRE, ALIGNED)
        two = _load_of(addresses, first + 1, world, offset, at, mask, WIRE, ALIGNED)
        three = _load_of(addresses, first + 2, world, offset, at, mask, WIRE, ALIGNED)
        four = _load_of(addresses, first + 3, world, offset, at, mask, WIRE, ALIGNED)
        value = combine(value, widen(one, ACCUMULATE), op)
        if first + 1 < world:
            value = combine(value, widen(two, ACCUMULATE), op)
        if first + 2 < world:
            value = combine(value, widen(three, ACCUMULATE), op)
        if first + 3 < world:
            value = combine(value, widen(four, ACCUMULATE), op)
    result = narrow(finish(value, scale, divisor), WIRE)
    if SHARE:
        tl.store(shared + at, result, mask=mask)
    if WIRE != MESSAGE:
        result = narrow(widen(result, ACCUMULATE), MESSAGE)
    tl.store(out + at, result, mask=mask)


@triton.jit
def reduce_piece(
    addresses,
    world,
    offset,
    length,
    op,
    scale,
    divisor,
    shared,
    out,
    SHARE: tl.constexpr,
    WIRE: tl.constexpr,
    MESSAGE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduces `length` elements of all ranks in rank order and rounds the scaled result once.

    Args:
        addresses: Points to an address per rank; `offset` bytes behind it lies the rank's piece, of WIRE.
        world: Number of ranks.
        offset: In bytes.
        length: In elements.
        op: Number of the operation.
        scale: Scalar of ACCUMULATE.
        divisor: Scalar of ACCUMULATE.
        shared: Pointer of WIRE that the result goes to as well, if SHARE.
        out: Pointer of MESSAGE that the result goes to.
        ALIGNED: Whether the pieces start at multiples of 16 bytes.
    """
    at = tl.arange(0, BLOCK)
    blocks = length // BLOCK
    for block in range(0, blocks):
        start = block.to(tl.int64) * BLOCK
        behind = offset + start * (WIRE.primitive_bitwidth // 8)
        if ALIGNED:
            behind = tl.multiple_of(behind, 16)
        _reduce_block(
            addresses, world, behind, at, None, op, scale, divisor, shared + start, out + start,
            SHARE, WIRE, MESSAGE, ACCUMULATE, ALIGNED,
        )  # fmt: skip
    start = blocks.to(tl.int64) * BLOCK
    rest = length - start
    if rest > 0:
        behind = offset + start * (WIRE.primitive_bitwidth // 8)
        _reduce_block(
            addresses, world, behind, at, at < rest, op, scale, divisor, shared + start, out + start,
            SHARE, WIRE, MESSAGE, ACCUMULATE, ALIGNED,
        )  # fmt: skip
