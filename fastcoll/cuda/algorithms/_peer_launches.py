"""The launches that one_shot, two_shot and ring share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastcoll.cuda.algorithms.algorithm import Piece, Prepared, Site
from fastcoll.cuda.algorithms.call import Call

__all__ = ["in_bucket", "staged"]


def staged(
    prepare: Callable[..., Any], call: Call, pieces: Sequence[Piece], site: Site
) -> Prepared:
    """Returns the single launch for a tensor at any address; the result of a reduce-scatter is this rank's chunk."""
    assert site.peers is not None
    (piece,) = pieces
    chunks = site.peers.buffers.world_size if call.collective == "reduce_scatter" else 1
    launch = prepare(
        site.view(piece.source, piece.count, call.dtype),
        site.view(piece.out, piece.count // chunks, call.dtype),
        site.peers.buffers,
        op=call.op.lower(),
        scale=call.scale,
        wire_dtype=call.wire_dtype,
    )
    return Prepared((lambda place: launch(*place),), uses_peers=True)


def in_bucket(call: Call, pieces: Sequence[Piece], site: Site, shares: bool) -> Prepared:
    """Returns the two launches for a list: into this rank's bucket, and from all ranks' buckets into the tensors.

    Args:
        call: The list.
        pieces: This rank's tensors.
        site: Where the plan runs.
        shares: Whether each rank reduces its share of the blocks (True) or all blocks.
    """
    from fastcoll.cuda.algorithms._flat import copy_in, layout_of, outs_of
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce

    peers = site.peers
    assert peers is not None
    layout = layout_of(call.sizes)
    bucket = peers.bucket(layout.elements, call.wire_dtype)
    reduce = BucketAllReduce(layout, call.wire_dtype, call.dtype, peers.buffers, peers.buckets)
    launch = reduce.prepare(
        outs_of(pieces, call.dtype, site), op=call.op.lower(), scale=call.scale, shares=shares
    )
    layout.read_here()
    launches = (copy_in(pieces, call.dtype, bucket, site), lambda place: launch(place.out))
    return Prepared(launches, uses_peers=True, tables=True)
