"""All-reduce through staging, in two ways: one_shot and two_shot.

Formula: out[i] = scale * (x_0[i] + x_1[i] + ... + x_{n-1}[i]), in fp32, by the CPU's tree over the ranks, rounded once
to the wire dtype; then cast back without loss, if the message's dtype is wider. All ranks get the same bits, by
either way.

Both copy a piece of the message to this rank's staging, where the peers read it. In one_shot every rank then reads all
ranks' pieces and reduces them for itself. In two_shot every rank reduces its share of the piece, over its own input to
that share, and then fetches the other shares. This is safe: only the share's owner reads that part of any rank's piece,
and the peers read the result after REDUCED.

Bytes for a message of S bytes (wire W), both: reads S and writes W to stage it.
- one_shot: reads (n - 1) W over the link and W locally, writes S.
  Bound: (n - 1) W / link bandwidth, plus one exchange of flags. For small messages the exchange dominates.
- two_shot: reads W / n of each rank, writes W / n to its staging and S / n; then reads W / n of each other rank, and
  writes (n - 1) S / n. Over the link 2 (n - 1) W / n.
  Bound: 2 (n - 1) / n W / link bandwidth, plus two exchanges of flags. Chosen from the size on where that is less.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastcoll.buckets import GRAIN
from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._configuration import Configuration, block_of, configuration_of
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, addressed, types_of
from fastcoll.kernels._exchange import begin, end, half_of, meet
from fastcoll.kernels._launch import Launch, arithmetic, pack
from fastcoll.kernels._pieces import GRAIN_ELEMENTS, copy_four, copy_piece, reduce_piece
from fastcoll.kernels._signals import READY, REDUCED
from fastcoll.kernels.peers import PeerBuffers

__all__ = ["configurations", "one_shot", "two_shot"]


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
def _fetch_shares(
    peers, half, here, rank, world, share, length, aligned,
    WIRE: tl.constexpr, MESSAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the other ranks' shares of a piece to the addresses from `here` on, four at a time."""
    item: tl.constexpr = MESSAGE.primitive_bitwidth // 8
    size: tl.constexpr = WIRE.primitive_bitwidth // 8
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


@triton.jit
def staged_kernel(
    source, out, peers, rank, world, channels, count, piece, stage_bytes,
    scale, divisor, limit, aligned,
    CUTS: tl.constexpr, MESSAGE: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One rank's part, a program per channel; see the head of the file. CUTS: two_shot."""
    channel = tl.program_id(0)
    source = source.to(tl.int64)
    out = out.to(tl.int64)
    peers = addressed(peers, tl.int64)
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
        staging = tl.load(peers + world + rank) + half
        copy_piece(source + start * item, staging, length, aligned, MESSAGE, WIRE, BLOCK)
        alive = meet(peers, world, rank, channel, READY, 1, number, limit)
        if CUTS:
            grains = (length + world * GRAIN_ELEMENTS - 1) // (world * GRAIN_ELEMENTS)
            share = grains * GRAIN_ELEMENTS
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
                _fetch_shares(
                    peers, half, out + start * item, rank, world, share, length, aligned,
                    WIRE, MESSAGE, BLOCK,
                )  # fmt: skip
        elif alive:
            reduce_piece(
                peers + world, world, half, length, aligned, factor, average,
                staging, out + start * item, False, WIRE, MESSAGE, BLOCK,
            )  # fmt: skip
        start += channels.to(tl.int64) * piece
    end(peers, world, rank, channel, 0, number, alive)


class _Staged:
    """One of the two ways.

    Attributes:
        table: Its configurations by the dtypes of the message and the wire.
    """

    def __init__(self, name: str, cuts: bool) -> None:
        self._cuts = cuts
        self.table = {
            (message, wire): configuration_of(
                f"{name} {types_of(message, wire)}",
                staged_kernel,
                divisible_by_16=frozenset({"stage_bytes"}),
                CUTS=cuts,
                MESSAGE=ELEMENT[message],
                WIRE=ELEMENT[wire],
                BLOCK=block_of(message, wire),
            )
            for message, wire in PAIRS
        }

    def prepare_all_reduce(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        peers: PeerBuffers,
        *,
        op: str = "sum",
        scale: float = 1.0,
        wire_dtype: torch.dtype | None = None,
    ) -> Launch:
        """Returns a launch that reduces `source` of all ranks into `out` of all ranks.

        Args:
            source: This rank's message: contiguous, any number of elements, equal on all ranks; float32, float16
                or bfloat16.
            out: Like `source`; may be `source` itself.
            peers: The ranks' buffers.
            op: "sum" or "avg".
            scale: Factor of the result, applied before rounding.
            wire_dtype: Dtype that travels; None for the dtype of `source`; float16 or bfloat16 for float32.

        Raises:
            RuntimeError: The buffers are closed.
        """
        wire = wire_dtype or source.dtype
        channels, stage = peers.layout.channels, peers.layout.stage_bytes
        grain = GRAIN * (peers.world_size if self._cuts else 1)
        staged = stage // wire.itemsize // grain * grain
        # C++ computes the number of programs, and a piece's elements, from the number of elements.
        return pack(
            self.table[source.dtype, wire],
            peers,
            channels,
            (source, out),
            (
                *(source.numel(), 0, stage),
                *arithmetic(op, scale, peers),
                *(peers.limit, int((source.data_ptr() | out.data_ptr()) % 16 == 0)),
            ),
            pieces=(5, block_of(source.dtype, wire), grain, staged, channels),
        )


one_shot = _Staged("one_shot", cuts=False)
two_shot = _Staged("two_shot", cuts=True)


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``prepare_all_reduce`` can launch."""
    for way in (one_shot, two_shot):
        yield from way.table.values()
