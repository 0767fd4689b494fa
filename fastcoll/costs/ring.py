"""Ring: every rank passes a chunk on to its neighbour, n - 1 times; for an all-reduce twice.

Phases: reduce-scatter (chunk q goes from rank q + 1 round to q, and is added to on its way), all-gather.
Steps:  all_reduce 2 (n - 1), the others n - 1.
Bytes:  all_reduce 2 (n - 1) / n S, the least possible; the others (n - 1) / n S.
Time in a node: 2 (n - 1) a + 2 (n - 1) / n S b + (n - 1) / n S c.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009); Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

On several nodes one ring would use one network card of each. So the message is cut once more, into R parts, each with
a ring of its own that enters a node at another GPU, as NCCL's channels do: a card sends 1 / R of what a rank sends.
"""

from __future__ import annotations

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "schedule"]


def all_reduce(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of a reduce-scatter and an all-gather."""
    return _cost(ranks, size, machine, reducing=True, gathering=True)


def reduce_scatter(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the first phase."""
    return _cost(ranks, size, machine, reducing=True, gathering=False)


def all_gather(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the second phase."""
    return _cost(ranks, size, machine, reducing=False, gathering=True)


def _cost(ranks: int, size: Number, machine: Machine, *, reducing: bool, gathering: bool) -> Cost:
    nodes, local = machine.nodes(ranks), machine.local(ranks)
    if ranks == 1:
        return Cost((), 0)
    chunk = size / ranks
    intra: Number | None = chunk
    inter: Number | None = None
    if nodes > 1:
        intra, inter = (local - 1) * chunk / local if local > 1 else None, chunk / local
    parts = []
    if reducing:
        parts.append(Steps(ranks - 1, intra, inter, chunk))
    if gathering:
        parts.append(Steps(ranks - 1, intra, inter))
    steps = len(parts) * (ranks - 1)
    return Cost(tuple(parts), steps * chunk, 0 if inter is None else steps * inter)


def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of all_reduce, reduce_scatter or all_gather."""
    nodes, local = machine.nodes(ranks), machine.local(ranks)
    rings = local if nodes > 1 else 1
    orders = [
        [node * local + (ring + place) % local for node in range(nodes) for place in range(local)]
        for ring in range(rings)
    ]
    plan = Schedule(ranks, ranks * rings)
    # What the rank at a place of a ring sends: the chunk of the rank so many places before it.
    if collective != "all_gather":
        plan.phase([_step(orders, step + 1, True) for step in range(ranks - 1)])
    if collective != "reduce_scatter":
        plan.phase([_step(orders, step, False) for step in range(ranks - 1)])
    return plan


def _step(orders: list[list[int]], back: int, reduces: bool) -> list[Transfer]:
    return [
        Transfer(
            rank,
            order[(place + 1) % len(order)],
            (order[place - back] * len(orders) + ring,),
            reduces,
        )
        for ring, order in enumerate(orders)
        for place, rank in enumerate(order)
    ]
