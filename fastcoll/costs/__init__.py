"""Cost models of collectives: what an algorithm sends, and how long that takes by the alpha-beta rule.

    algorithm = ALGORITHMS["all_reduce"]["ring"]
    cost = algorithm.cost(64, 1 << 20, HGX_H200.machine("LL128"))
    cost.steps, cost.wire_bytes, cost.seconds(machine)

Models, not measurements. Each algorithm has a closed formula and a schedule of its messages; tests execute the
schedule on integers and hold the formula to what was counted. ``python -m fastcoll.bench --simulate`` prints
predictions, ``--list-algorithms`` the formulas, and which of them fastcoll's own algorithms follow.

Words: n ranks, R ranks of a node, N nodes, S bytes of the message (of the whole message: what reduce_scatter takes
and all_gather gives), a and b the latency and the seconds per byte of a link in the node, A and B those between nodes,
c the seconds to reduce a byte.
"""

from __future__ import annotations

from fastcoll.costs.algorithms import ALGORITHMS, Algorithm
from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.execution import execute
from fastcoll.costs.implemented import IMPLEMENTED, Implemented
from fastcoll.costs.machine import HGX_B200, HGX_H200, Link, Machine, Platform
from fastcoll.costs.prediction import Prediction, predict
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = [
    "ALGORITHMS",
    "HGX_B200",
    "HGX_H200",
    "IMPLEMENTED",
    "Algorithm",
    "Cost",
    "Implemented",
    "Link",
    "Machine",
    "Platform",
    "Prediction",
    "Schedule",
    "Steps",
    "Transfer",
    "execute",
    "predict",
]
