"""One-shot all-reduce by the kernel of fastcoll.kernels.one_shot: every rank reads all messages.

Phases: stage the message (cast to the wire dtype), exchange flags, read and reduce all ranks' messages. A list is
flattened into this rank's bucket in the mapped memory, and reduced from all buckets into the tensors.
Bytes: (n - 1) W. Steps: 1; 2 for a list. Launches: 1; 2 for a list.
Chosen for small messages, whose time depends on the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastcoll.cuda.algorithms.algorithm import PeerAlgorithm, Piece, Prepared, Site
from fastcoll.cuda.algorithms.call import Call, Topology

__all__ = ["OneShot"]


class OneShot(PeerAlgorithm):
    """See the head of the file."""

    name = "one_shot"

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        return super().refusal(call, topology) or self.room(call, topology)

    def launches(self, call: Call) -> int:
        """Returns 1, or 2 for a list."""
        return 2 if call.is_list else 1

    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call."""
        from fastcoll.cuda.algorithms._peer_launches import in_bucket, staged
        from fastcoll.kernels import one_shot

        if call.is_list:
            return in_bucket(call, pieces, site, shares=False)
        return staged(one_shot.prepare_all_reduce, call, pieces, site)
