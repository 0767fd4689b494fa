"""Two-shot all-reduce by the kernel of fastcoll.kernels.two_shot: a rank reduces its share, then fetches the others.

Phases: stage the message (cast to the wire dtype), exchange flags, reduce the own share, exchange flags, fetch the
others. A list is flattened into this rank's bucket in the mapped memory, reduced there, and fetched into the tensors.
Bytes: 2 (n - 1) W / n. Steps: 2; 3 for a list. Launches: 1; 2 for a list.
Chosen for messages too large for one_shot; its bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastcoll.cuda.algorithms.algorithm import PeerAlgorithm, Piece, Prepared, Site
from fastcoll.cuda.algorithms.call import Call, Topology

__all__ = ["TwoShot"]


class TwoShot(PeerAlgorithm):
    """See the head of the file."""

    name = "two_shot"

    def refusal(self, call: Call, topology: Topology) -> str:
        """Returns why it cannot serve a call, or ""."""
        return super().refusal(call, topology) or self.room(call, topology)

    def launches(self, call: Call) -> int:
        """Returns 1, or 2 for a list."""
        return 2 if call.is_list else 1

    def prepare(self, call: Call, pieces: Sequence[Piece], site: Site) -> Prepared:
        """Returns the launches for a call."""
        from fastcoll.cuda.algorithms._peer_launches import in_bucket, staged
        from fastcoll.kernels import two_shot

        if call.is_list:
            return in_bucket(call, pieces, site, shares=True)
        return staged(two_shot.prepare_all_reduce, call, pieces, site)
