"""The chunked ring of fastcoll.kernels.ring, through slots of the right neighbour.

Phases: n - 1 hops for partial sums, then n - 1 hops for results, in a pipeline of segments.
Partial sums travel in the accumulate dtype, so there is one rounding; their order differs from chunk to chunk.
Bytes: (n - 1) / n of the message in the accumulate dtype and as much in the wire dtype. Steps: 2 (n - 1).
Reduce-scatter is the first phase only, all-gather the second.
Launches: 1; 3 for a list, which goes through a bucket.
Chosen if each rank has a fast link to its neighbours only; for reduce-scatter and all-gather only if forced.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastcoll.cuda.algorithms.algorithm import Launch, PeerAlgorithm, Piece, Place, Prepared, Site
from fastcoll.cuda.algorithms.call import Call

__all__ = ["Ring"]


class Ring(PeerAlgorithm):
    """See the head of the file."""

    name = "ring"

    def launches(self, call: Call) -> int:
        """Returns 1, or 3 for a list."""
        return 3 if call.is_list else 1

    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call."""
        from fastcoll.cuda.algorithms._flat import copy_in, copy_out, layout_of
        from fastcoll.cuda.algorithms._peer_launches import staged
        from fastcoll.kernels import ring

        if call.collective == "all_gather":
            return _gathered(call, pieces[0], site)
        scatters = call.collective == "reduce_scatter"
        prepare = ring.prepare_reduce_scatter if scatters else ring.prepare_all_reduce
        if not call.is_list:
            return staged(prepare, call, pieces, site)
        elements = layout_of(call.sizes).elements
        memory = site.workspace(elements * call.dtype.itemsize)
        bucket = site.view(memory.data_ptr(), elements, call.dtype)
        whole = [Piece(bucket.data_ptr(), bucket.data_ptr(), elements)]
        (reduce,) = staged(prepare, call, whole, site).launches
        place = Place(bucket.data_ptr(), bucket.data_ptr())
        launches: tuple[Launch, ...] = (
            copy_in(pieces, call.dtype, bucket, site),
            lambda _: reduce(place),
            copy_out(pieces, call.dtype, bucket, site),
        )
        return Prepared(launches, held=memory, uses_peers=True, tables=True)


def _gathered(call: Call, piece: Piece, site: Site) -> Prepared:
    from fastcoll.kernels import ring

    assert site.peers is not None
    ranks = site.peers.buffers.world_size
    source = site.view(piece.source, piece.count, call.dtype)
    out = site.view(piece.out, piece.count * ranks, call.dtype)
    launch = ring.prepare_all_gather(source, out, site.peers.buffers)
    return Prepared((lambda place: launch(*place),), uses_peers=True)
