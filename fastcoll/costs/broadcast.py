"""Broadcast from rank 0: at once, in parts that are passed on, or along a chain in segments.

Phases: flat: the root sends all others the message. scatter_all_gather: it sends each other rank a part of its own,
        which that passes on to the rest of them. chain: rank r sends rank r + 1 segment after segment.
Steps:  flat 1, scatter_all_gather 2, chain n + k - 2.
Bytes:  flat (n - 1) S, the others S.
Time in a node: flat a + (n - 1) S b; scatter_all_gather 2 a + (1 + (n - 2) / (n - 1)) S b; chain
        (n + k - 2) (a + S / k b). k is the one that makes it least.
Source: flat and chain: Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations", Cluster Computing
10 (2007). scatter_all_gather: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency Computat.: Pract. Exper. 19 (2007), with both halves direct, and without the root
among those that gather.
"""

from __future__ import annotations

import math

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = [
    "best_segments",
    "chain",
    "chain_schedule",
    "flat",
    "flat_schedule",
    "scatter_all_gather",
    "scatter_all_gather_schedule",
    "unsupported",
]


def unsupported(ranks: int, machine: Machine) -> str:
    """Returns why there is no model of flat and scatter_all_gather, or ""."""
    mixed = machine.nodes(ranks) > 1 and machine.per_node > 1
    return "several nodes of several ranks each" if mixed else ""


def flat(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of one step."""
    return _cost(ranks, machine, (ranks - 1) * size)


def scatter_all_gather(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of two steps; of one where a single other rank has nobody to pass anything on to."""
    passed_on = ((ranks - 2) * size / (ranks - 1),) if ranks > 2 else ()
    return _cost(ranks, machine, size, *passed_on)


def _cost(ranks: int, machine: Machine, *sent: Number) -> Cost:
    """A step for each entry: what the busiest rank sends. The first is the root's."""
    if reason := unsupported(ranks, machine):
        raise ValueError(f"fastcoll.costs.broadcast: {reason}")
    if ranks == 1:
        return Cost((), 0)
    crosses = machine.nodes(ranks) > 1
    parts = tuple(Steps(1, *((None, each) if crosses else (each, None))) for each in sent)
    return Cost(parts, sent[0], sent[0] if crosses else 0)


def chain(ranks: int, size: Number, machine: Machine, segments: int | None = None) -> Cost:
    """Returns the cost of a pipeline of so many segments; None: of the best number."""
    if ranks == 1:
        return Cost((), 0)
    k = best_segments(ranks, size, machine) if segments is None else segments
    crosses = machine.nodes(ranks) > 1
    steps = Steps(
        ranks + k - 2,
        size / k if machine.local(ranks) > 1 else None,
        size / k if crosses else None,
    )
    return Cost((steps,), size, size if crosses else 0)


def best_segments(ranks: int, size: Number, machine: Machine) -> int:
    """Returns the k of the shortest time."""
    link = machine.inter if machine.nodes(ranks) > 1 else machine.intra
    near = math.isqrt(int((ranks - 2) * size * link.seconds_per_byte / link.latency))
    return min(
        (max(1, near), near + 1),
        key=lambda k: chain(ranks, size, machine, k).seconds(machine),
    )


def flat_schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of flat."""
    plan = Schedule(ranks, 1)
    if ranks > 1:
        plan.phase([[Transfer(0, rank, (0,), False) for rank in range(1, ranks)]])
    return plan


def scatter_all_gather_schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of scatter_all_gather: piece r - 1 is what rank r passes on."""
    others = range(1, ranks)
    plan = Schedule(ranks, max(1, ranks - 1))
    if ranks > 1:
        plan.phase([[Transfer(0, rank, (rank - 1,), False) for rank in others]])
    if ranks > 2:
        plan.phase([
            [Transfer(s, t, (s - 1,), False) for s in others for t in others if s != t]
        ])  # fmt: skip
    return plan


def chain_schedule(collective: str, ranks: int, machine: Machine, segments: int = 1) -> Schedule:
    """Returns the messages of a chain of so many segments."""
    plan = Schedule(ranks, segments)
    plan.phase([
        [
            Transfer(rank, rank + 1, (step - rank,), False)
            for rank in range(ranks - 1)
            if 0 <= step - rank < segments
        ]
        for step in range(ranks + segments - 2 if ranks > 1 else 0)
    ])  # fmt: skip
    return plan
