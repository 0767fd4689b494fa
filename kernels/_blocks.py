"""What the kernels on lists of tensors share: a program's block, its addresses, its loads and stores.

A program works on one block: BLOCK neighbouring elements of one tensor, fewer at the tensor's end. The
block map says which: (tensor, piece) for each program. Where a tensor lies is the sum of a base and of
the tensor's entry in a row of addresses: a flat bucket has its own address for base and byte offsets for
a row; scattered tensors have base 0 and their addresses for a row. All addresses are 64-bit integers, so
that a launch needs no tensor, and no bucket is too large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._dtypes import addressed, narrow, widen

__all__ = [
    "ALL_INTEGERS",
    "element_address",
    "is_wide",
    "load",
    "locate",
    "store",
]

ALL_INTEGERS = [
    *("block_map", "sizes", "input_base", "input_row", "output_base", "output_row"),
    "scale_bits",
]
"""Arguments that ``kernel[grid](...)`` must not turn into constants when they are 1."""


@triton.jit
def locate(block_map, sizes, BLOCK: tl.constexpr):
    """Returns this program's tensor, the index of its first element in it, and how many are left."""
    entry = addressed(block_map, tl.int32) + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1).to(tl.int64) * BLOCK
    left = tl.load(addressed(sizes, tl.int64) + tensor) - start
    return tensor, start, left


@triton.jit
def element_address(base, row, tensor, start, TYPE: tl.constexpr):
    """Returns the address of element `start` of a tensor; base 0 where the row has whole addresses."""
    size: tl.constexpr = TYPE.primitive_bitwidth // 8
    return base + tl.load(addressed(row, tl.int64) + tensor) + start * size


@triton.jit
def is_wide(addresses, left, BLOCK: tl.constexpr):
    """Tells whether a block is whole and begins at multiples of 16 bytes: its accesses have 128 bits."""
    return (left >= BLOCK) & ((addresses & 15) == 0)


@triton.jit
def load(
    address, left, TYPE: tl.constexpr, TO: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr
):
    """Returns LANES elements in the accumulate dtype TO; without WIDE only `left` are read, else 0."""
    lanes = tl.arange(0, LANES)
    if WIDE:
        return widen(tl.load(addressed(address, TYPE, 16) + lanes), TYPE, TO)
    else:
        there = lanes < left
        return widen(tl.load(addressed(address, TYPE) + lanes, mask=there, other=0), TYPE, TO)


@triton.jit
def store(address, left, values, TYPE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Rounds LANES elements to TYPE and stores them; without WIDE only `left`."""
    lanes = tl.arange(0, LANES)
    stored = narrow(values, TYPE)
    if WIDE:
        tl.store(addressed(address, TYPE, 16) + lanes, stored)
    else:
        tl.store(addressed(address, TYPE) + lanes, stored, mask=lanes < left)
