"""Error texts of CUDA devices, in the same form as those of C++."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["ABORTED", "NEVER_MADE", "Member", "names_of"]

ABORTED = "the group was aborted. Initialize it again to use it again."
NEVER_MADE = "the communicator was aborted before it was made: "
"""Followed by the cause."""


@dataclass(frozen=True)
class Member:
    """A rank of a group, as errors name it.

    Attributes:
        group: Name of the group.
        rank: This process in the group.
        size: Number of ranks of the group.
    """

    group: str
    rank: int
    size: int

    def message(self, what: str, text: str) -> str:
        """Returns ``text`` with a head that names the failed call, the group and the rank."""
        return f"fastcoll.{what} [group '{self.group}', rank {self.rank}/{self.size}]: {text}"

    def fault(self, what: str, text: str) -> dist.DistBackendError:
        """Returns the exception for a fault at run time, to be raised or kept."""
        return dist.DistBackendError(self.message(what, text))


def names_of(ranks: Iterable[int]) -> str:
    """Returns "rank 3", or "ranks 1, 2"; for more than eight ranks, the first eight and a count of the rest."""
    known = sorted(ranks)
    text = ", ".join(map(str, known[:8])) + (f" and {len(known) - 8} more" if known[8:] else "")
    return f"rank{'s' if len(known) > 1 else ''} {text}"
