"""Hierarchical: inside the nodes over the fast links, between the nodes with what is left, 1 / R of the message.

Phases: direct reduce-scatter in each node; R groups at a time, of the ranks with one place in their nodes, reduce
        their chunk between the nodes by a flat algorithm; direct all-gather in each node.
Steps:  2 + those of the flat algorithm on N ranks. reduce_scatter and all_gather: 1 + those.
Bytes:  2 (R - 1) / R S in the node, and what the flat algorithm sends for S / R between nodes.
Source: the composition of Thakur, Rabenseifner and Gropp (2005) and of Chan et al. (2007), as in Jia et al., "Highly
scalable deep learning training system with mixed-precision", arXiv:1807.11205 (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["cost_with", "schedule_with", "unsupported"]

Formula = Callable[[int, Number, Machine], Cost]
Plan = Callable[[str, int, Machine], Schedule]


def unsupported(ranks: int, machine: Machine) -> str:
    """Returns why there is nothing hierarchical, or ""."""
    if machine.nodes(ranks) == 1:
        return "one node"
    return "one rank per node" if machine.per_node == 1 else ""


def cost_with(flat: Formula, collective: str) -> Formula:
    """Returns the formula of a collective with a flat algorithm between the nodes."""

    def cost(ranks: int, size: Number, machine: Machine) -> Cost:
        local = machine.local(ranks)
        inside = (local - 1) * size / local
        between = flat(machine.nodes(ranks), size / local, machine.spread())
        parts = [replace(part, intra=None) for part in between.parts]
        if collective != "all_gather":
            parts.insert(0, Steps(1, inside, None, inside))
        if collective != "reduce_scatter":
            parts.append(Steps(1, inside))
        phases = 2 if collective == "all_reduce" else 1
        return Cost(tuple(parts), phases * inside + between.wire_bytes, between.wire_bytes)

    return cost


def schedule_with(flat: Plan) -> Plan:
    """Returns the messages of a collective with a flat algorithm between the nodes."""

    def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
        local = machine.local(ranks)
        between = flat(collective, machine.nodes(ranks), machine.spread())
        # Piece q of a chunk that the ranks with place g reduce is piece q R + g of the message.
        plan = Schedule(ranks, between.pieces * local)
        if collective != "all_gather":
            plan.phase([_inside(plan, local, reduces=True)])
        for phase in between.phases:
            plan.phase([_widened(step, local) for step in phase])
        if collective != "reduce_scatter":
            plan.phase([_inside(plan, local, reduces=False)])
        return plan

    return schedule


def _inside(plan: Schedule, local: int, *, reduces: bool) -> list[Transfer]:
    """The direct step in each node: everybody's chunk from everybody, or to everybody."""
    return [
        Transfer(
            first + source,
            first + target,
            tuple(range(target if reduces else source, plan.pieces, local)),
            reduces,
        )
        for first in range(0, plan.ranks, local)
        for source in range(local)
        for target in range(local)
        if source != target
    ]


def _widened(step: list[Transfer], local: int) -> list[Transfer]:
    return [
        Transfer(
            transfer.source * local + place,
            transfer.target * local + place,
            tuple(piece * local + place for piece in transfer.pieces),
            transfer.reduces,
        )
        for transfer in step
        for place in range(local)
    ]
