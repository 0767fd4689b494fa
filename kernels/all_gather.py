"""All-gather by direct reads: every rank fetches every rank's chunk.

Formula: out[q C + i] = x_q[i] for all ranks q and chunks of C elements. Bytes are moved, whatever the dtype.

Bytes for chunks of S bytes on n ranks: reads S and writes S to stage the own chunk, reads S of each rank, writes n S.
Direct: reads S of each rank, writes n S. Over the link (n - 1) S.
Bound: (n - 1) S / link bandwidth, plus one exchange of flags (two if direct).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._exchange import begin, end, half_of, meet, part_of, stage_address, table_at
from fastcoll.kernels._peer_checks import GRAIN, Chunk, Registered
from fastcoll.kernels._peer_launch import (
    INTEGERS,
    REGISTERS,
    WARPS,
    PreparedCollective,
    channels_for,
    pack,
    signature_of,
    staged_piece,
)
from fastcoll.kernels._pieces import copy_piece
from fastcoll.kernels._prepared import at_once
from fastcoll.kernels._signals import READY
from fastcoll.kernels.peers import PeerBuffers

__all__ = ["all_gather", "configurations", "prepare_all_gather"]

_BLOCK_BYTES = 16384
_GRAIN_BYTES = 4 * GRAIN


@triton.jit(do_not_specialize=INTEGERS)
def all_gather_kernel(
    source, out, peers, messages, rank, world, channels, count, piece, stage_bytes, spins, aligned,
    MESSAGE: tl.constexpr, STAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A rank's part, a program per channel; see the head of the file."""
    channel, rank, source, out = part_of(source, out, rank, channels, False)
    peers = table_at(peers)
    alive, number = begin(peers, world, rank, channel, 0)
    count = count.to(tl.int64)
    piece = piece.to(tl.int64)
    size: tl.constexpr = MESSAGE.primitive_bitwidth // 8
    start = channel.to(tl.int64) * piece
    while (start < count) & alive:
        length = tl.minimum(count - start, piece)
        number += 1
        half = half_of(channel, number, stage_bytes)
        if STAGED:
            staging = stage_address(peers, world, rank) + half
            copy_piece(
                source + start * size, staging, length, aligned, MESSAGE, MESSAGE, MESSAGE, BLOCK
            )
        alive = meet(peers, world, rank, channel, READY, 1, number, spins)
        if alive:
            for step in range(world):
                peer = (rank + step) % world
                if STAGED:
                    address = tl.load(peers + world + peer) + half
                else:
                    address = tl.load(table_at(messages) + peer) + start * size
                copy_piece(
                    address, out + (peer * count + start) * size, length, aligned,
                    MESSAGE, MESSAGE, MESSAGE, BLOCK,
                )  # fmt: skip
            if not STAGED:
                number += 1
                alive = meet(peers, world, rank, channel, READY, 3, number, spins)
        start += channels.to(tl.int64) * piece
    end(peers, world, rank, channel, 0, number, alive)


@functools.cache
def _configuration(item_bytes: int, staged: bool) -> Configuration:
    return Configuration(
        name=f"all_gather {item_bytes}-byte items {'staged' if staged else 'direct'}",
        kernel=all_gather_kernel,
        signature=signature_of(all_gather_kernel),
        constexprs={
            "MESSAGE": tl.int32 if item_bytes == 4 else tl.uint8,
            "STAGED": staged,
            "BLOCK": 4096,
        },
        divisible_by_16=frozenset({"stage_bytes"}),
        num_warps=WARPS,
        wide=item_bytes == 4,
        options={"maxnreg": REGISTERS},
    )


def configurations() -> Iterator[Configuration]:
    """Yields all that :func:`all_gather` can launch."""
    for staged in (True, False):
        yield _configuration(4, staged)
        yield _configuration(1, staged)


def prepare_all_gather(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    channels: int | None = None,
    registered: Registered | None = None,
) -> PreparedCollective:
    """Returns a launch that gathers `source` of all ranks into `out` of all ranks, in rank order.

    Args:
        source: This rank's chunk: contiguous, any dtype, any number of elements, equal on all ranks.
        out: As many chunks as there are ranks; `source` may be this rank's chunk of it.
        peers: The ranks' buffers.
        channels: Programs; None for as many as there are blocks, up to what the layout has.
        registered: The addresses of all ranks' chunks, if the peers map them: they are read where they are.

    Raises:
        TypeError, ValueError: An argument cannot be.
        RuntimeError: The buffers are closed.
    """
    chunk = Chunk.of(source, out, peers)
    if registered is not None:
        registered.require(source, peers)
    configuration = _configuration(chunk.item_bytes, registered is None)
    # In bytes: what a rank's alignment allows must not change where its pieces begin.
    programs = channels_for(chunk.bytes, _BLOCK_BYTES, peers, channels)
    piece = -(-chunk.bytes // (max(programs, 1) * _GRAIN_BYTES)) * _GRAIN_BYTES
    if registered is None:
        piece = min(piece, staged_piece(peers, 1, _GRAIN_BYTES))
    return pack(
        configuration,
        peers,
        programs,
        (source, out),
        None,
        peers.table,
        peers.table if registered is None else registered.table,
        arguments=(
            chunk.bytes // chunk.item_bytes,
            piece // chunk.item_bytes,
            peers.layout.stage_bytes,
            peers.spins,
            int(chunk.aligned),
        ),
    )


all_gather = at_once(prepare_all_gather)
