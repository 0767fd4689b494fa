"""Shared parts of the kernels on lists of tensors: a program's block, its addresses, its loads and stores.

A block is BLOCK adjacent elements of one tensor, fewer at the tensor's end. The block map has the (tensor, piece) of
each. A tensor's address is a base plus the tensor's entry in a
row. For a flat bucket the base is its address, and the row has byte offsets. For scattered tensors the
base is 0, and the row has their addresses. All addresses are 64-bit integers, so a launch needs no tensor,
and no bucket is too large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._dtypes import accumulate_dtype, addressed, narrow, widen

__all__ = [
    "element_address",
    "is_wide",
    "load",
    "locate",
    "store",
]


@triton.jit
def locate(block_map, sizes, block, BLOCK: tl.constexpr):
    """Returns the tensor of block number `block`, the index of its first element in it, and the elements left there."""
    entry = addressed(block_map, tl.int32) + 2 * block
    tensor = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1).to(tl.int64) * BLOCK
    left = tl.load(addressed(sizes, tl.int64) + tensor) - start
    return tensor, start, left


@triton.jit
def element_address(base, row, tensor, start, TYPE: tl.constexpr):
    """Returns the address of element `start` of a tensor; base is 0 if the row has absolute addresses."""
    size: tl.constexpr = TYPE.primitive_bitwidth // 8
    return base + tl.load(addressed(row, tl.int64) + tensor) + start * size


@triton.jit
def is_wide(addresses, left, BLOCK: tl.constexpr):
    """Returns whether a block is whole and 16-byte aligned, so that its accesses have 128 bits."""
    return (left >= BLOCK) & ((addresses & 15) == 0)


@triton.jit
def load(address, left, TYPE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Returns LANES elements in the accumulate dtype; without WIDE reads only `left` and returns 0 for the rest."""
    lanes = tl.arange(0, LANES)
    if WIDE:
        stored = tl.load(addressed(address, TYPE, 16) + lanes)
    else:
        stored = tl.load(addressed(address, TYPE) + lanes, mask=lanes < left, other=0)
    return widen(stored, TYPE, accumulate_dtype(TYPE))


@triton.jit
def store(address, left, values, TYPE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Rounds LANES elements to TYPE and stores them; without WIDE stores only `left`."""
    lanes = tl.arange(0, LANES)
    stored = narrow(values, TYPE)
    if WIDE:
        tl.store(addressed(address, TYPE, 16) + lanes, stored)
    else:
        tl.store(addressed(address, TYPE) + lanes, stored, mask=lanes < left)
