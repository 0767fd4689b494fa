"""Two-shot all-reduce: every rank reduces its share of each piece, then fetches the other shares.

Formula: that of one_shot, with the same bits: out[i] = scale * (x_0[i] + ... + x_{n-1}[i]), in fp32, in rank order,
rounded once, by the rank that owns the share.

Bytes for a message of S bytes (wire W): reads S and writes W to stage it; reduce: reads W / n of each rank, writes
W / n to its staging and S / n; gather: reads W / n of each other rank, writes (n - 1) S / n. Over the link
2 (n - 1) W / n.
Bound: 2 (n - 1) / n W / link bandwidth, plus two exchanges of flags. Chosen from the size on where that is less than
the (n - 1) W of one_shot.

A rank writes its reduced share over its own input to that share. This is safe: only the share's owner reads that part
of any rank's message, and the peers read the result after REDUCED.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._exchange import begin, end, half_of, meet, stage_address, table_at
from fastcoll.kernels._peer_launch import all_reduce_by, staged_table
from fastcoll.kernels._pieces import GRAIN_ELEMENTS, copy_four, copy_piece, reduce_piece
from fastcoll.kernels._signals import READY, REDUCED

__all__ = ["configurations", "prepare_all_reduce"]


@triton.jit
def _share_of(
    bases, offset, out, rank, world, step, share, length, size: tl.constexpr, item: tl.constexpr
):
    """Returns source address, target address and elements of the share of rank `rank + step`.

    There are 0 elements for a step past the last rank.
    """
    peer = (rank + step) % world
    first = peer * share
    count = tl.minimum(share, tl.maximum(length - first, 0))
    count = tl.where(step < world, count, 0)
    return tl.load(bases + peer) + offset + first * size, out + first * item, count


@triton.jit
def two_shot_kernel(
    source, out, peers, rank, world, channels, count, piece, stage_bytes,
    scale, divisor, limit, aligned,
    MESSAGE: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One rank's part, a program per channel; see the head of the file."""
    channel = tl.program_id(0)
    source = source.to(tl.int64)
    out = out.to(tl.int64)
    peers = table_at(peers)
    alive, number = begin(peers, world, rank, channel, 0)
    factor = factor_of(scale, tl.float32)
    average = averager(divisor)
    count = count.to(tl.int64)
    piece = piece.to(tl.int64)
    item: tl.constexpr = MESSAGE.primitive_bitwidth // 8
    size: tl.constexpr = WIRE.primitive_bitwidth // 8
    start = channel.to(tl.int64) * piece
    while (start < count) & alive:
        length = tl.minimum(count - start, piece)
        number += 1
        half = half_of(channel, number, stage_bytes)
        staging = stage_address(peers, world, rank) + half
        copy_piece(source + start * item, staging, length, aligned, MESSAGE, WIRE, BLOCK)
        alive = meet(peers, world, rank, channel, READY, 1, number, limit)
        share = (length + world * GRAIN_ELEMENTS - 1) // (world * GRAIN_ELEMENTS) * GRAIN_ELEMENTS
        if alive:
            first = rank * share
            own = tl.minimum(share, tl.maximum(length - first, 0))
            reduce_piece(
                peers + world, world, half + first * size, own, aligned, factor, average,
                staging + first * size, out + (start + first) * item,
                True, WIRE, MESSAGE, BLOCK,
            )  # fmt: skip
            alive = meet(peers, world, rank, channel, REDUCED, 2, number, limit)
        if alive:
            here = out + start * item
            for step in range(1, world, 4):
                source0, target0, length0 = _share_of(
                    peers + world, half, here, rank, world, step, share, length, size, item
                )
                source1, target1, length1 = _share_of(
                    peers + world, half, here, rank, world, step + 1, share, length, size, item
                )
                source2, target2, length2 = _share_of(
                    peers + world, half, here, rank, world, step + 2, share, length, size, item
                )
                source3, target3, length3 = _share_of(
                    peers + world, half, here, rank, world, step + 3, share, length, size, item
                )
                copy_four(
                    (source0, source1, source2, source3),
                    (target0, target1, target2, target3),
                    (length0, length1, length2, length3),
                    (aligned, aligned, aligned, aligned),
                    WIRE, MESSAGE, BLOCK,
                )  # fmt: skip
        start += channels.to(tl.int64) * piece
    end(peers, world, rank, channel, 0, number, alive)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``prepare_all_reduce`` can launch."""
    yield from staged_table("two_shot", two_shot_kernel).values()


prepare_all_reduce = all_reduce_by("two_shot", two_shot_kernel, cuts=True)
