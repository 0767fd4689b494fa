"""One-shot all-reduce: every rank reads all ranks' messages and reduces them for itself.

Formula: out[i] = scale * (x_0[i] + x_1[i] + ... + x_{n-1}[i]), in fp32, in rank order, rounded once to the wire dtype;
then cast back without loss, if the message's dtype is wider. All ranks get the same bits, those of two_shot.

Bytes for a message of S bytes (wire W): reads S and writes W to stage it, reads (n - 1) W over the link and W locally,
writes S.
Bound: (n - 1) W / link bandwidth, plus one exchange of flags. For small messages the exchange dominates, and two_shot
needs one more.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._exchange import begin, end, half_of, meet, stage_address, table_at
from fastcoll.kernels._peer_launch import all_reduce_by, staged_table
from fastcoll.kernels._pieces import copy_piece, reduce_piece
from fastcoll.kernels._signals import READY

__all__ = ["configurations", "prepare_all_reduce"]


@triton.jit
def one_shot_kernel(
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
    start = channel.to(tl.int64) * piece
    while (start < count) & alive:
        length = tl.minimum(count - start, piece)
        number += 1
        half = half_of(channel, number, stage_bytes)
        staging = stage_address(peers, world, rank) + half
        copy_piece(source + start * item, staging, length, aligned, MESSAGE, WIRE, BLOCK)
        alive = meet(peers, world, rank, channel, READY, 1, number, limit)
        if alive:
            reduce_piece(
                peers + world, world, half, length, aligned, factor, average,
                staging, out + start * item, False, WIRE, MESSAGE, BLOCK,
            )  # fmt: skip
        start += channels.to(tl.int64) * piece
    end(peers, world, rank, channel, 0, number, alive)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``prepare_all_reduce`` can launch."""
    yield from staged_table("one_shot", one_shot_kernel).values()


prepare_all_reduce = all_reduce_by("one_shot", one_shot_kernel)
