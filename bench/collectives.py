"""The collectives: the buffers of each, its expected result, and its bandwidth as nccl-tests counts it.

A *chunk* is one rank's share of a buffer. `size`, as in nccl-tests, is the larger of the two buffers of a
rank in bytes. `count` is the elements of a chunk, or of the whole buffer if there are no chunks. The import needs no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["COLLECTIVES", "Case", "Collective", "bandwidths", "build_case"]

Expected = Callable[[int, int, int], list[tuple[int | None, int]]]
"""(rank, ranks, root) -> the chunks of the rank's result in order, each by the rank that sent it, or None for the
reduction over all ranks, and the number of the chunk in the sent buffers."""


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        name: The word of the command line.
        expected: Returns the result.
        factor: Returns bus bandwidth over algorithm bandwidth for a number of ranks, as nccl-tests counts.
        send: The part that a rank sends: "chunk", "whole" or "none".
        receive: The part that a rank receives, likewise; "same": it arrives in the buffer that is sent.
        reduces: Whether it takes a reduction.
        rooted: Whether one rank, the root, differs from the others.
    """

    name: str
    expected: Expected
    factor: Callable[[int], float]
    send: str = "whole"
    receive: str = "whole"
    reduces: bool = False
    rooted: bool = False

    @property
    def chunked(self) -> bool:
        """Whether a buffer is divided among the ranks."""
        return "chunk" in (self.send, self.receive) or self.name == "all_to_all"


@dataclass(frozen=True)
class Case:
    """One collective with its buffers, on one rank.

    Attributes:
        size: Bytes of the larger buffer.
        count: Elements of a chunk, or of the whole.
        send: The buffer that this rank sends, 1-D.
        receive: The buffer of its result, 1-D; the same tensor if the collective works in place.
    """

    collective: Collective
    dtype: torch.dtype
    op: str
    rank: int
    world_size: int
    root: int
    size: int
    count: int
    send: Tensor = field(repr=False)
    receive: Tensor = field(repr=False)

    @property
    def expected(self) -> list[tuple[int | None, int]]:
        """The result on this rank."""
        return self.collective.expected(self.rank, self.world_size, self.root)

    @property
    def lifetime(self) -> int | None:
        """Calls after ``reset`` whose results are finite, and no zeros; None: any number.

        Sums in place grow by a factor of the world size in each call.
        """
        if self.op != "sum" or self.receive is not self.send or self.world_size == 1:
            return None
        import torch

        most = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        doublings = math.log2(most.max) - math.log2(self._start)
        return max(2, int(doublings / math.log2(self.world_size)))

    @property
    def _start(self) -> float:
        import torch

        in_place_sum = self.op == "sum" and self.receive is self.send
        floating = self.dtype.is_floating_point
        return torch.finfo(self.dtype).tiny if in_place_sum and floating else 1

    def reset(self) -> None:
        """Sets the buffers to ones, or for sums in place to the least normal number.

        A minimum, a mean and a product leave ones as they are. Zeros would not do: on AMD EPYC, non-temporal stores of
        zeros take less time than those of other bytes.
        """
        self.send.fill_(self._start)
        self.receive.fill_(self._start)


def _gathered(rank: int, ranks: int, root: int) -> list[tuple[int | None, int]]:
    return [(source, 0) for source in range(ranks)]


def _if_root(expected: Expected) -> Expected:
    return lambda rank, ranks, root: expected(rank, ranks, root) if rank == root else []


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


# fmt: off
_ALL = [
    Collective("all_reduce", lambda *_: [(None, 0)], lambda ranks: 2 * _share(ranks), receive="same", reduces=True),
    Collective("all_gather", _gathered, _share, send="chunk"),
    Collective("reduce_scatter", lambda rank, *_: [(None, rank)], _share, receive="chunk", reduces=True),
    Collective("broadcast", lambda rank, ranks, root: [(root, 0)], _one, receive="same", rooted=True),
    Collective("all_to_all", lambda rank, ranks, root: [(source, rank) for source in range(ranks)], _share),
    Collective("sendrecv", lambda rank, ranks, root: [((rank - 1) % ranks, 0)], _one),
    Collective("barrier", lambda *_: [], lambda ranks: 0.0, send="none", receive="none"),
    Collective("reduce", _if_root(lambda *_: [(None, 0)]), _one, receive="same", reduces=True, rooted=True),
    Collective("gather", _if_root(_gathered), _share, send="chunk", rooted=True),
    Collective("scatter", lambda rank, ranks, root: [(root, rank)], _share, receive="chunk", rooted=True),
]
# fmt: on

COLLECTIVES: dict[str, Collective] = {collective.name: collective for collective in _ALL}


def bandwidths(name: str, size: int, ranks: int, microseconds: float) -> tuple[float, float]:
    """Returns algorithm and bus bandwidth as nccl-tests counts them.

    Args:
        name: Name of the collective.
        size: Size of the larger buffer of a rank, in bytes.
        ranks: Number of ranks.
        microseconds: Time of a call.

    Returns:
        Two numbers in GB/s (1e9 bytes).
    """
    algorithm = size / microseconds / 1e3 if microseconds > 0 else 0.0
    return algorithm, algorithm * COLLECTIVES[name].factor(ranks)


def build_case(
    name: str,
    size: int,
    dtype: torch.dtype,
    op: str,
    rank: int,
    world_size: int,
    root: int,
    device: torch.device,
) -> Case:
    """Allocates the buffers of a collective.

    Args:
        name: Name of the collective.
        size: Requested bytes of the larger buffer. They are cut to whole elements, equally many for each rank
            and at least one; the case has the resulting size.
        dtype: Dtype of the elements.
        op: The reduction; ignored by collectives without one.
        rank: Rank of this process.
        world_size: Number of ranks.
        root: Root of rooted collectives.
        device: Device of the buffers.
    """
    import torch

    collective = COLLECTIVES[name]
    parts = world_size if collective.chunked else 1
    count = 0 if collective.send == "none" else max(1, size // dtype.itemsize // parts)
    elements = {"chunk": count, "whole": count * parts, "none": 0}
    send = torch.empty(elements[collective.send], dtype=dtype, device=device)
    receive = send
    if collective.receive != "same":
        receive = torch.empty(elements[collective.receive], dtype=dtype, device=device)
    size = max(send.numel(), receive.numel()) * dtype.itemsize
    op = op if collective.reduces else "none"
    return Case(collective, dtype, op, rank, world_size, root, size, count, send, receive)
