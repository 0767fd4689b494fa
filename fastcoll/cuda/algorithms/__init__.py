"""Algorithms for collectives of device tensors: for each name, which calls it serves and what it launches.

Importing this package imports neither Triton nor CuPy; preparing a call does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fastcoll.cuda.algorithms import over_nccl, over_peers
from fastcoll.cuda.algorithms.call import Call, Topology
from fastcoll.cuda.algorithms.launches import Piece, PlanContext, Prepared

__all__ = ["ALGORITHMS", "Algorithm", "Call", "Topology"]


class Algorithm(NamedTuple):
    """An algorithm.

    Attributes:
        name: Its name for FASTCOLL_ALGO and the tuner.
        refusal: Returns why it cannot serve a call, or "".
        measured: Returns how many sums of squares its kernels write if a call is measured; 0: they do not measure it.
        prepare: Returns the steps for a call that it does not refuse. They also serve other tensors with the same
            numbers of elements. Each of those must be aligned to 16 bytes, and in place, if the tensor here is.
        uses_peers: Whether the launches work on the peers' memory.
    """

    name: str
    refusal: Callable[[Call, Topology], str]
    measured: Callable[[Call, Topology], int]
    prepare: Callable[[Call, Sequence[Piece], PlanContext], Prepared]
    uses_peers: bool = False


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        *(
            Algorithm(
                *(name, over_peers.refuse_shot, over_peers.measured_shot),
                *(partial(over_peers.prepare_shot, name), True),
            )
            for name in ("one_shot", "two_shot")
        ),
        Algorithm(
            *("ring", over_peers.refuse_peers, over_peers.measured_ring),
            *(over_peers.prepare_ring, True),
        ),
        Algorithm("nccl", over_nccl.refuse_nccl, over_nccl.measured_nccl, over_nccl.prepare_nccl),
        Algorithm(
            *("all_to_all", over_nccl.refuse_all_to_all, over_nccl.measured_all_to_all),
            over_nccl.prepare_all_to_all,
        ),
    )
}
"""By name."""
