"""All-reduce of buckets in the peers' mapped memory, straight into the tensors: it includes unflatten.

Formula: tensor[t][i] = scale * (bucket_0[offset[t] + i] + ... + bucket_{n-1}[offset[t] + i]), in fp32, by the CPU's
tree over the ranks, rounded once to the wire dtype; then cast without loss, if the tensors' dtype is wider. The
bits are those of one_shot and two_shot.

A bucket is cut into blocks of one tensor. Channel c handles blocks c, c + channels, c + 2 * channels, and so on.
Rank k % n reduces the k-th block of a channel, in place in its bucket, and the others fetch it.

Bytes for a bucket of W bytes in the wire dtype and tensors of S bytes: reads W / n of each rank, writes W / n and
S / n; then reads W / n of each other rank and writes the rest of S: over the link 2 (n - 1) W / n.
If it measures, the rank that reduces a block also sums the squares of what it writes, in float64. The sum lies behind
its bucket, and the others fetch it with the block, 8 bytes. So all ranks get equal bits, wherever their tensors lie.
Bound: those bytes over the link, plus three exchanges of flags. After the last exchange no rank reads this rank's
bucket, so it can be refilled, and the launch can be captured and replayed.

Fill the bucket before, on the same stream: the first exchange releases the stream's earlier writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import PIECE, BucketLayout, address_table
from fastcoll.kernels._arithmetic import averager, factor_of
from fastcoll.kernels._blocks import element_address, locate
from fastcoll.kernels._configuration import Configuration, block_of, configuration_of
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, addressed, types_of
from fastcoll.kernels._exchange import begin, end, meet
from fastcoll.kernels._launch import Launch, arithmetic, kernel_on, prepared
from fastcoll.kernels._pieces import as_mask, copy_four, reduce_piece
from fastcoll.kernels._signals import READY, REDUCED
from fastcoll.kernels.peers import PeerBuffers

__all__ = ["BucketAllReduce", "bucket_kernel", "configurations"]


@triton.jit
def _place(
    block_map, sizes, bucket_row, output_row, block,
    WIRE: tl.constexpr, OUTPUT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Returns a block's offset in a bucket in bytes, the address of its output, and its elements."""
    tensor, start, left = locate(block_map, sizes, block, PIECE)
    offset = element_address(0, bucket_row, tensor, start, WIRE)
    out = element_address(0, output_row, tensor, start, OUTPUT)
    return offset, out, tl.minimum(left, PIECE)


@triton.jit
def _peers_block(
    block_map, sizes, bucket_row, output_row, buckets, rank, world,
    block, blocks, turn, WIRE: tl.constexpr, OUTPUT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Returns the block's address at its owner, the address of its output, its elements, and whether both are aligned.

    There are 0 elements if there is no such block, or if this rank owns it.
    """
    owner = turn % world
    offset, out, length = _place(
        block_map, sizes, bucket_row, output_row, tl.minimum(block, blocks - 1), WIRE, OUTPUT, PIECE
    )
    source = tl.load(buckets + owner) + offset
    length = tl.where((block < blocks) & (owner != rank), length, 0)
    return source, out, length, ((source | out) % 16 == 0).to(tl.int32)


@triton.jit
def _fetch_square(buckets, squares_offset, squares, rank, world, block, blocks, turn):
    """Copies the sum of a block's squares from its owner, unless this rank owns it."""
    owner = turn % world
    fetches = as_mask((block < blocks) & (owner != rank))
    source = addressed(tl.load(buckets + owner) + squares_offset, tl.float64) + block
    square = tl.load(source, mask=fetches, other=0.0, cache_modifier=".cg")
    tl.store(addressed(squares, tl.float64) + block, square, mask=fetches)


@triton.jit
def bucket_kernel(
    block_map, sizes, blocks, peers, buckets, bucket_row, output_row, rank, world, channels,
    scale, divisor, limit, squares_offset, squares,
    WIRE: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    MEASURES: tl.constexpr,
):  # fmt: skip
    """One rank's part, a program per channel; see the head of the file.

    If MEASURES, the sums of squares lie `squares_offset` bytes behind the beginning of a bucket, and all go to the
    address `squares`.
    """
    channel = tl.program_id(0)
    peers = addressed(peers, tl.int64)
    buckets = addressed(buckets, tl.int64)
    alive, number = begin(peers, world, rank, channel, 0)
    factor = factor_of(scale, tl.float32)
    average = averager(divisor)
    own = tl.load(buckets + rank)
    blocks = blocks.to(tl.int64)
    number += 1
    if alive:
        alive = meet(peers, world, rank, channel, READY, 1, number, limit)
    turn = tl.zeros([], tl.int64)
    block = channel.to(tl.int64)
    while (block < blocks) & alive:
        if turn % world == rank:
            offset, out, length = _place(
                block_map, sizes, bucket_row, output_row, block, WIRE, OUTPUT, PIECE
            )
            wide = (((own + offset) | out) % 16 == 0).to(tl.int32)
            square = reduce_piece(
                buckets, world, offset, length, wide, factor, average,
                own + offset, out, True, WIRE, OUTPUT, BLOCK, MEASURES=MEASURES,
            )  # fmt: skip
            if MEASURES:
                tl.store(addressed(own + squares_offset, tl.float64) + block, square)
                tl.store(addressed(squares, tl.float64) + block, square)
        turn += 1
        block += channels
    if alive:
        alive = meet(peers, world, rank, channel, REDUCED, 2, number, limit)
        turn = tl.zeros([], tl.int64)
        block = channel.to(tl.int64)
        while (block < blocks) & alive:
            source0, out0, length0, wide0 = _peers_block(
                block_map, sizes, bucket_row, output_row, buckets, rank, world,
                block, blocks, turn, WIRE, OUTPUT, PIECE,
            )  # fmt: skip
            source1, out1, length1, wide1 = _peers_block(
                block_map, sizes, bucket_row, output_row, buckets, rank, world,
                block + channels, blocks, turn + 1, WIRE, OUTPUT, PIECE,
            )  # fmt: skip
            source2, out2, length2, wide2 = _peers_block(
                block_map, sizes, bucket_row, output_row, buckets, rank, world,
                block + 2 * channels, blocks, turn + 2, WIRE, OUTPUT, PIECE,
            )  # fmt: skip
            source3, out3, length3, wide3 = _peers_block(
                block_map, sizes, bucket_row, output_row, buckets, rank, world,
                block + 3 * channels, blocks, turn + 3, WIRE, OUTPUT, PIECE,
            )  # fmt: skip
            copy_four(
                (source0, source1, source2, source3),
                (out0, out1, out2, out3),
                (length0, length1, length2, length3),
                (wide0, wide1, wide2, wide3),
                WIRE, OUTPUT, BLOCK,
            )  # fmt: skip
            if MEASURES:
                for ahead in tl.static_range(4):
                    _fetch_square(
                        buckets, squares_offset, squares, rank, world,
                        block + ahead * channels, blocks, turn + ahead,
                    )  # fmt: skip
            turn += 4
            block += 4 * channels
    if alive:
        number += 1
        alive = meet(peers, world, rank, channel, READY, 3, number, limit)
    end(peers, world, rank, channel, 0, number, alive)


_TABLE = {
    (wire, output, measures): configuration_of(
        f"bucket_all_reduce {types_of(wire, output)}" + " measured" * measures,
        bucket_kernel,
        WIRE=ELEMENT[wire],
        OUTPUT=ELEMENT[output],
        BLOCK=block_of(output, wire),
        PIECE=PIECE,
        MEASURES=measures,
    )
    for output, wire in PAIRS
    for measures in (False, True)
}


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that ``BucketAllReduce`` can launch."""
    yield from _TABLE.values()


class BucketAllReduce:
    """All-reduces of buckets of one layout into tensors.

    Args:
        layout: Places of the tensors in a bucket; the same on all ranks, tensors at multiples of 16 elements.
        wire_dtype: Dtype of the buckets.
        dtype: Dtype of the tensors: that of the buckets, or float32 for bfloat16 and float16.
        peers: The ranks' buffers.
        buckets: Address of each rank's bucket, as this rank's device maps it, at multiples of 16 bytes: int64
            [world size] on the device. If it measures, ``layout.blocks(PIECE)`` float64 lie behind each, at a multiple
            of 16 bytes.
        measures: Whether to sum the squares of what is written.

    Raises:
        ValueError: Kernels cannot run on that device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        peers: PeerBuffers,
        buckets: Tensor,
        measures: bool = False,
    ) -> None:
        self._peers = peers
        self._blocks = layout.blocks(PIECE)
        self._squares_offset = -(-layout.elements * wire_dtype.itemsize // 16) * 16
        self._configuration = _TABLE[wire_dtype, dtype, measures]
        kernel_on(self._configuration, peers.device)
        self._tables = (
            layout.block_map(PIECE, peers.device),
            layout.device_sizes(peers.device),
            buckets,
            layout.byte_offsets(wire_dtype, peers.device),
        )

    def prepare(
        self,
        tensors: Sequence[Tensor],
        *,
        op: str = "sum",
        scale: float = 1.0,
        squares: int = 0,
    ) -> Launch:
        """Returns a launch that can be repeated as long as the tensors keep their addresses.

        Args:
            tensors: The layout's tensors; each dense, none overlapping another, none in a bucket.
            op: "sum" or "avg".
            scale: Factor of the result, applied before rounding.
            squares: If it measures: address of a float64 for each of ``layout.blocks(PIECE)`` blocks, in order. A plan
                adds the address of its call.

        Raises:
            RuntimeError: The buffers are closed.
        """
        peers = self._peers
        peers.require_open()
        row = address_table([tensor.data_ptr() for tensor in tensors], peers.device)
        programs = min(peers.layout.channels, self._blocks)
        block_map, sizes, buckets, bucket_row = (table.data_ptr() for table in self._tables)
        arguments = (
            *(block_map, sizes, self._blocks, peers.table.data_ptr(), buckets, bucket_row),
            *(row.data_ptr(), peers.rank, peers.world_size, programs),
            *(*arithmetic(op, scale, peers), peers.limit, self._squares_offset, squares),
        )
        held = (self._tables, row, peers)
        places = {"out_at": 6, "squares_at": 14}
        return prepared(self._configuration, peers.device, programs, arguments, held, **places)
