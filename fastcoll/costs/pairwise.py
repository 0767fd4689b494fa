"""Pairwise exchange: in step t every rank sends its chunk of the message to the rank t places on, and adds what comes.

Phases: reduce-scatter, all-gather; each as an all-to-all, n - 1 steps.
Steps:  all_reduce 2 (n - 1), the others n - 1.
Bytes:  all_reduce 2 (n - 1) / n S, the others (n - 1) / n S. Between nodes (n - R) / n S a phase, R times as much
        as a ring: all of the messages have to leave the node, not their sum.
Time in a node: 2 (n - 1) a + 2 (n - 1) / n S b + (n - 1) / n S c.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005). One rank gets all parts of a sum unrounded, so that it can round once: how a
16-bit wire is exact over a library that only moves bytes.
"""

from __future__ import annotations

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "schedule"]


def all_reduce(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of both phases."""
    chunk = size / ranks
    return _cost(ranks, chunk, machine, (chunk, 0))


def reduce_scatter(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the first phase."""
    return _cost(ranks, size / ranks, machine, (size / ranks,))


def all_gather(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the second phase."""
    return _cost(ranks, size / ranks, machine, (0,))


def _cost(ranks: int, chunk: Number, machine: Machine, reduced: tuple[Number, ...]) -> Cost:
    nodes, local = machine.nodes(ranks), machine.local(ranks)
    # In each step somebody sends to another node, if there is one: that is what the step lasts.
    intra, inter = (chunk, None) if nodes == 1 else (None, chunk)
    parts = tuple(Steps(ranks - 1, intra, inter, size) for size in reduced) if ranks > 1 else ()
    return Cost(parts, len(parts) * (ranks - 1) * chunk, len(parts) * (ranks - local) * chunk)


def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of all_reduce, reduce_scatter or all_gather."""
    plan = Schedule(ranks, ranks)
    if collective != "all_gather":
        plan.phase([_step(ranks, distance, True) for distance in range(1, ranks)])
    if collective != "reduce_scatter":
        plan.phase([_step(ranks, distance, False) for distance in range(1, ranks)])
    return plan


def _step(ranks: int, distance: int, reduces: bool) -> list[Transfer]:
    return [
        Transfer(rank, (rank + distance) % ranks, ((rank + distance * reduces) % ranks,), reduces)
        for rank in range(ranks)
    ]
