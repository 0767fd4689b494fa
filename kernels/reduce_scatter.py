"""Reduce-scatter by direct reads: every rank reads its chunk of all ranks' messages and reduces it.

Formula: out[i] = scale * (x_0[r C + i] op ... op x_{n-1}[r C + i]) on rank r, for chunks of C elements, in fp32
(float64 in float64), in rank order, rounded once, to the dtype of the message: a chunk of one_shot's result where
that dtype travels.

Bytes for a chunk of S bytes (wire W): reads n S and writes n W to stage the message, reads W of each rank, writes S.
Direct: reads S of each rank, writes S. Over the link (n - 1) W.
Bound: (n - 1) W / link bandwidth, plus one exchange of flags (two if direct).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._exchange import begin, end, half_of, meet, part_of, stage_address, table_at
from fastcoll.kernels._peer_checks import Message, Registered
from fastcoll.kernels._peer_launch import (
    INTEGERS,
    PreparedCollective,
    choices,
    configuration_of,
    prepare,
)
from fastcoll.kernels._pieces import copy_piece, reduce_piece
from fastcoll.kernels._prepared import at_once
from fastcoll.kernels._signals import READY
from fastcoll.kernels.peers import PeerBuffers

__all__ = ["configurations", "prepare_reduce_scatter", "reduce_scatter"]


@triton.jit(do_not_specialize=INTEGERS)
def reduce_scatter_kernel(
    source, out, peers, messages, rank, world, channels, count, piece, stage_bytes,
    op, scale, divisor, spins, aligned,
    MESSAGE: tl.constexpr, WIRE: tl.constexpr, ACCUMULATE: tl.constexpr,
    STAGED: tl.constexpr, EVERY_RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A rank's part, or EVERY_RANK's, a program per channel; see the head of the file."""
    channel, rank, source, out = part_of(source, out, rank, channels, EVERY_RANK)
    peers = table_at(peers)
    alive, number = begin(peers, world, rank, channel, 0)
    factor = factor_of(scale, ACCUMULATE)
    average = averager(divisor, ACCUMULATE)
    count = count.to(tl.int64)
    piece = piece.to(tl.int64)
    size: tl.constexpr = WIRE.primitive_bitwidth // 8
    item: tl.constexpr = MESSAGE.primitive_bitwidth // 8
    start = channel.to(tl.int64) * piece
    while (start < count) & alive:
        length = tl.minimum(count - start, piece)
        number += 1
        half = half_of(channel, number, stage_bytes)
        if STAGED:
            staging = stage_address(peers, world, rank) + half
            for chunk in range(world):
                copy_piece(
                    source + (chunk * count + start) * item, staging + chunk * piece * size,
                    length, aligned, MESSAGE, WIRE, ACCUMULATE, BLOCK,
                )  # fmt: skip
        alive = meet(peers, world, rank, channel, READY, 1, number, spins)
        if alive:
            if STAGED:
                reduce_piece(
                    peers + world, world, half + rank * piece * size, length, aligned, op, factor, average,
                    staging, out + start * item, False, WIRE, MESSAGE, ACCUMULATE, BLOCK,
                )  # fmt: skip
            else:
                reduce_piece(
                    table_at(messages), world, (rank * count + start) * size, length, 1, op, factor, average,
                    out, out + start * item, False, WIRE, MESSAGE, ACCUMULATE, BLOCK,
                )  # fmt: skip
                number += 1
                alive = meet(peers, world, rank, channel, READY, 3, number, spins)
        start += channels.to(tl.int64) * piece
    end(peers, world, rank, channel, 0, number, alive)


def configurations() -> Iterator[Configuration]:
    """Yields all that :func:`reduce_scatter` can launch."""
    for choice in choices(every_rank=False):
        yield configuration_of("reduce_scatter", reduce_scatter_kernel, choice)


def prepare_reduce_scatter(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    channels: int | None = None,
    registered: Registered | None = None,
) -> PreparedCollective:
    """Returns a launch that reduces `source` of all ranks; each rank gets the chunk of its number.

    Args:
        source: This rank's message: contiguous, as many chunks as there are ranks, equal on all ranks; float32,
            float16, bfloat16, float64.
        out: One chunk; may be this rank's chunk of `source`.
        peers: The ranks' buffers.
        op: "sum", "avg", "min", "max" or "product".
        scale: The result is multiplied by it before it is rounded.
        wire_dtype: What travels; None for the dtype of `source`, float16 or bfloat16 for float32.
        channels: Programs; None for as many as there are pieces, up to what the layout has.
        registered: The addresses of all ranks' messages, if the peers map them: they are read where they are.

    Raises:
        TypeError, ValueError: An argument cannot be.
        RuntimeError: The buffers are closed.
    """
    message = Message.of(source, out, peers, op, scale, wire_dtype, source_chunks=peers.world_size)
    return prepare(
        "reduce_scatter",
        reduce_scatter_kernel,
        message,
        peers,
        channels,
        registered,
        None,
        staged_chunks=peers.world_size,
    )


reduce_scatter = at_once(prepare_reduce_scatter)
