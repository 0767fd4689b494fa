"""Algorithms that work in memory that the ranks map of each other: ``one_shot``, ``two_shot`` and ``ring``.

n is the number of ranks, and W the size of the message as it travels.

one_shot: every rank reads all messages, by the kernel of fastcoll.kernels.staged.
    Phases: stage the message (cast to the wire dtype), exchange flags, read and reduce all ranks' messages. A list is
    reduced as by two_shot.
    Bytes: (n - 1) W. Steps: 1. Launches: 1.
    Chosen for small messages, whose time depends on the steps.

two_shot: a rank reduces its share, then fetches the others, by the same kernel.
    Phases: stage the message (cast to the wire dtype), exchange flags, reduce the own share, exchange flags, fetch the
    others. A list is flattened into this rank's bucket in the mapped memory, reduced there, and fetched into the
    tensors.
    Bytes: 2 (n - 1) W / n. Steps: 2; 3 for a list. Launches: 1; 2 for a list.
    Chosen for messages too large for one_shot; its bits are the same.

ring: the chunked ring of fastcoll.kernels.ring, through slots of the right neighbour.
    Phases: n - 1 hops for partial sums, then n - 1 hops for results, in a pipeline of segments.
    Partial sums travel in float32, so there is one rounding; their order differs from chunk to chunk.
    Bytes: (n - 1) / n of the message in float32 and as much in the wire dtype. Steps: 2 (n - 1).
    Reduce-scatter is the first phase only, all-gather the second.
    Launches: 1; 3 for a list, which goes through a bucket.
    Chosen if each rank has a fast link to its neighbours only; for reduce-scatter and all-gather only if forced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastcoll._load_cuda import CUDA
from fastcoll.buckets import BLOCK, PIECE
from fastcoll.cuda.algorithms.call import Call, Topology, refuse_sum
from fastcoll.cuda.algorithms.launches import (
    Piece,
    PlanContext,
    Prepared,
    bucket_bytes,
    copy_in,
    layout_of,
    through_bucket,
)

__all__ = [
    "measured_ring",
    "measured_shot",
    "prepare_ring",
    "prepare_shot",
    "refuse_peers",
    "refuse_shot",
]


def refuse_peers(call: Call, topology: Topology) -> str:
    """Returns why no algorithm over the peers' memory can serve a call, or ""."""
    if not topology.peers:
        return f"the ranks map no memory of each other: {topology.reason}"
    if call.collective == "all_gather":  # only moves bytes
        return ""
    return refuse_sum(call)


def refuse_shot(call: Call, topology: Topology) -> str:
    """Returns why one_shot and two_shot cannot serve a call, or "": a list must fit into the mapped memory."""
    if call.collective != "all_reduce":
        return f"it has no {call.collective}"
    needed = bucket_bytes(call.sizes, call.wire_dtype.itemsize) if call.is_list else 0
    if (refusal := refuse_peers(call, topology)) or needed <= topology.bucket_bytes:
        return refusal
    return (
        f"a bucket of {needed} bytes does not fit into the {topology.bucket_bytes} that ranks map"
    )


def measured_shot(call: Call, topology: Topology) -> int:
    """Returns the number of sums of squares: of a list, one for each part that a rank reduces for the others."""
    return layout_of(call.sizes).blocks(PIECE) if call.is_list else 0


def measured_ring(call: Call, topology: Topology) -> int:
    """Returns the number of sums of squares that copying a list out of its bucket makes."""
    return layout_of(call.sizes).blocks(BLOCK) if call.is_list else 0


def prepare_ring(call: Call, pieces: Sequence[Piece], context: PlanContext) -> Prepared:
    """Returns the launches for a call."""
    from fastcoll.kernels import ring

    if call.collective == "all_gather":
        assert context.peers is not None
        buffers, piece = context.peers.buffers, pieces[0]
        source = context.view(piece.source, piece.elements, call.dtype)
        out = context.view(piece.out, piece.elements * buffers.world_size, call.dtype)
        return Prepared((ring.prepare_all_gather(source, out, buffers),))
    scatters = call.collective == "reduce_scatter"
    prepare = ring.prepare_reduce_scatter if scatters else ring.prepare_all_reduce
    if not call.is_list:
        return Prepared((_staged(prepare, call, pieces[0], context),))

    def reduce(address: int, elements: int) -> CUDA.Launch:
        return _staged(prepare, call, Piece(address, address, elements), context).fixed()

    return through_bucket(call, pieces, context, reduce)


def _staged(
    prepare: Callable[..., CUDA.Launch], call: Call, piece: Piece, context: PlanContext
) -> CUDA.Launch:
    """Returns the single launch for a tensor at any address; the result of a reduce-scatter is this rank's chunk."""
    assert context.peers is not None
    buffers = context.peers.buffers
    chunks = buffers.world_size if call.collective == "reduce_scatter" else 1
    return prepare(
        context.view(piece.source, piece.elements, call.dtype),
        context.view(piece.out, piece.elements // chunks, call.dtype),
        buffers,
        op=call.op.lower(),
        scale=call.scale,
        wire_dtype=call.wire_dtype,
    )


def prepare_shot(name: str, call: Call, pieces: Sequence[Piece], context: PlanContext) -> Prepared:
    """Returns a tensor's launch, by the way of that name, or a list's two.

    A list's go into this rank's bucket, and from all buckets into the tensors.
    """
    if not call.is_list:
        from fastcoll.kernels import staged

        prepare = getattr(staged, name).prepare_all_reduce
        return Prepared((_staged(prepare, call, pieces[0], context),), of_count=False)
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce

    peers = context.peers
    assert peers is not None
    layout = layout_of(call.sizes)
    bucket = peers.bucket(layout.elements, call.wire_dtype)
    measures = context.squares is not None
    reduce = BucketAllReduce(
        layout, call.wire_dtype, call.dtype, peers.buffers, peers.buckets, measures
    )
    outs = [context.view(piece.out, piece.elements, call.dtype) for piece in pieces]
    launch = reduce.prepare(
        outs, op=call.op.lower(), scale=call.scale, squares=context.squares or 0
    )
    layout.read_here()
    return Prepared((copy_in(pieces, call.dtype, bucket, context), launch), tables=True)
