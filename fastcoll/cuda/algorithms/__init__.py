"""All-reduce algorithms for tensors on devices: one a file, with phases, steps and bytes in its head.

Importing this package imports neither Triton nor CuPy; preparing a call does.
"""

from __future__ import annotations

from fastcoll.cuda.algorithms.algorithm import Algorithm
from fastcoll.cuda.algorithms.all_to_all import AllToAll
from fastcoll.cuda.algorithms.call import Call, Topology
from fastcoll.cuda.algorithms.nccl import Nccl
from fastcoll.cuda.algorithms.one_shot import OneShot
from fastcoll.cuda.algorithms.ring import Ring
from fastcoll.cuda.algorithms.two_shot import TwoShot

__all__ = ["ALGORITHMS", "Algorithm", "Call", "Topology"]

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm for algorithm in (OneShot(), TwoShot(), Ring(), Nccl(), AllToAll())
}
"""By name."""
