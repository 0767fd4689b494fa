"""NCCL's own all-reduce; a list goes through one bucket: copy-in, collective, copy-out.

Phases: the library's. Bytes: 2 (n - 1) / n of the message, as in a ring. Steps: 2 (n - 1), as in a ring; fewer if
NCCL uses a tree or the switch.
Chosen for messages that no other algorithm serves faster, and for dtypes and operations without a kernel. NCCL
chooses the order of the sum, and rounds 16-bit partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fastcoll.cuda.algorithms.algorithm import (
    FLOATS,
    OPS,
    Algorithm,
    Piece,
    Place,
    Prepared,
    Site,
)
from fastcoll.cuda.algorithms.call import Call, Topology

__all__ = ["Nccl"]


class Nccl(Algorithm):
    """See the head of the file."""

    name = "nccl"

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        if call.wire is not None:
            return "NCCL rounds every partial sum to the dtype that travels; all_to_all does not"
        if (call.is_list or call.scale != 1.0) and not topology.kernels:
            return "the kernels that fuse tensors need Triton on all ranks"
        if (call.is_list or call.scale != 1.0) and call.dtype not in FLOATS:
            return f"no kernel fuses tensors of {call.dtype}"
        if (call.is_list or call.scale != 1.0) and call.op not in OPS:
            return f"no bucket is reduced by {call.op}"
        return ""

    def launches(self, call: Call) -> int:
        """Returns 1, or 3 with copy-in and copy-out."""
        return 3 if call.is_list or call.scale != 1.0 else 1

    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call."""
        op = getattr(dist.ReduceOp, call.op)
        dtype, stream, communicator = call.dtype, site.stream, site.communicator
        if self.launches(call) == 1:
            (piece,) = pieces

            def reduce(place: Place) -> None:
                communicator.all_reduce(*place, piece.count, dtype, op, stream)

            return Prepared((reduce,))
        from fastcoll.cuda.algorithms._flat import copy_in, copy_out, layout_of

        elements = layout_of(call.sizes).elements
        memory = site.workspace(elements * dtype.itemsize)
        address = memory.data_ptr()
        bucket = site.view(address, elements, dtype)

        def reduce_bucket(_: Place) -> None:
            communicator.all_reduce(address, address, elements, dtype, op, stream)

        launches = (
            copy_in(pieces, dtype, bucket, site),
            reduce_bucket,
            copy_out(pieces, dtype, bucket, site, call.scale),
        )
        return Prepared(launches, held=memory, tables=True)
