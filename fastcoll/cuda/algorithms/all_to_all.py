"""All-reduce with one rounding over NCCL: all-to-all, a fused sum in float32, all-gather.

Phases: cast to the wire dtype (not if the message has that dtype and divides evenly); send each rank its share; sum
the received shares in rank order in float32, round once, and write over the own share; gather the shares; cast back.
Bytes: 2 (n - 1) W / n. Steps: 2 (the library's). Launches: 3 kernels and 2 NCCL calls; on one rank only the casts.
Chosen for narrower wires if ranks do not map each other's memory. The error is one rounding for any number of ranks;
the bits are those of one_shot and two_shot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcoll.cuda.algorithms.algorithm import (
    Algorithm,
    Launch,
    Piece,
    Place,
    Prepared,
    Site,
)
from fastcoll.cuda.algorithms.call import Call, Topology

__all__ = ["AllToAll"]

_GRAIN = 16  # elements: shares begin at multiples of 16 bytes in every dtype
_WIRES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


class AllToAll(Algorithm):
    """See the head of the file."""

    name = "all_to_all"

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        if not topology.kernels:
            return "the kernels need Triton on all ranks"
        if call.op not in ("SUM", "AVG"):
            return f"its sums are SUM and AVG, not {call.op}"
        if call.wire_dtype not in _WIRES.get(call.dtype, ()):
            return (
                f"it takes float32, bfloat16 and float16, not {call.dtype} over {call.wire_dtype}"
            )
        return ""

    def launches(self, call: Call) -> int:
        """Returns the number with casts or copies, the largest."""
        return 5

    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call."""
        from fastcoll.cuda.algorithms._flat import copy_in, copy_out, layout_of
        from fastcoll.kernels.reduce import prepare_reduce

        member = site.communicator.member
        wire, item, ranks = call.wire_dtype, call.wire_dtype.itemsize, member.size
        in_place = self._needs_no_copy(call, ranks)
        elements = call.elements if in_place else layout_of(call.sizes).elements
        share = -(-elements // (ranks * _GRAIN)) * _GRAIN
        size = ranks * share * item
        memory = site.workspace(size if in_place else 2 * size)
        received = memory.data_ptr()
        own_share = received + member.rank * share * item
        flat = received + size
        before: list[Launch] = []
        behind: list[Launch] = []
        if not in_place:
            bucket = site.view(flat, elements, wire)
            before.append(copy_in(pieces, call.dtype, bucket, site))
            behind.append(copy_out(pieces, call.dtype, bucket, site))
        # The padding of the last shares is sent, but never summed.
        own = max(0, min(share, elements - member.rank * share))
        summed = prepare_reduce(
            [received + rank * share * item for rank in range(ranks)],
            own_share,
            own,
            wire,
            site.device,
            op=call.op,
            scale=call.scale,
        )
        if (
            ranks == 1 and call.scale == 1.0 and (not in_place or pieces[0].source == pieces[0].out)
        ):  # the sum of one rank is the cast message
            return Prepared((*before, *behind), held=memory, tables=not in_place)
        communicator, stream = site.communicator, site.stream

        def exchange(place: Place) -> None:
            sent = place.source if in_place else flat
            with communicator.group():
                for rank in range(ranks):
                    communicator.send(sent + rank * share * item, share, wire, rank, stream)
                    communicator.receive(received + rank * share * item, share, wire, rank, stream)

        def gather(place: Place) -> None:
            gathered = place.out if in_place else flat
            communicator.all_gather(own_share, gathered, share, wire, stream)

        launches = (*before, exchange, lambda _: summed(), gather, *behind)
        return Prepared(launches, held=memory, tables=not in_place)

    @staticmethod
    def _needs_no_copy(call: Call, ranks: int) -> bool:
        """Whether the message itself is cut into shares; depends only on what is equal on all ranks."""
        return call.wire is None and not call.is_list and call.elements % (ranks * _GRAIN) == 0
