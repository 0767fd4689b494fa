"""Hierarchical in parts: while one part of the message is between the nodes, others are inside them.

Phases: those of `hierarchical`, for each of p parts of the message. The reduce-scatter of the first part and the
        all-gather of the last have a step of their own. Otherwise a node's reduce-scatter of part i + 1 and its
        all-gather of part i - 1 are cut into as many slices as part i has steps between the nodes, and go along with
        these.
Steps:  2 + p s, with s the steps of the flat algorithm on N ranks.
Bytes:  those of `hierarchical`.
Source: as `hierarchical`; the overlap of both kinds of links is that of NCCL's tree (a chain in each node, a tree
        between them, in a pipeline of chunks) and of Cho et al., "BlueConnect: Decomposing all-reduce for deep learning
        on heterogeneous network hierarchy", SysML 2019.
p is the power of two up to 64 of the shortest time; with p = 1 it is `hierarchical`.
"""

from __future__ import annotations

from dataclasses import replace

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.hierarchical import Formula, Plan
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["best_parts", "cost_with", "schedule_with"]

_PARTS = tuple(1 << power for power in range(7))


def cost_with(flat: Formula) -> Formula:
    """Returns the formula of an all-reduce with a flat algorithm between the nodes."""

    def cost(ranks: int, size: Number, machine: Machine) -> Cost:
        return in_parts(flat, ranks, size, machine, best_parts(flat, ranks, size, machine))

    return cost


def best_parts(flat: Formula, ranks: int, size: Number, machine: Machine) -> int:
    """Returns the p of the shortest time."""

    def seconds(parts: int) -> Number:
        return in_parts(flat, ranks, size, machine, parts).seconds(machine)

    return min(_PARTS, key=seconds)


def in_parts(flat: Formula, ranks: int, size: Number, machine: Machine, parts: int) -> Cost:
    """Returns the cost with so many parts."""
    local = machine.local(ranks)
    part = size / parts
    inside = (local - 1) * part / local
    between = flat(machine.nodes(ranks), part / local, machine.spread())
    steps = [Steps(1, inside, None, inside)]
    # How many parts have a next one, and one before them, on their way in the nodes.
    kinds = [(1, 0, 0)] if parts == 1 else [(1, 1, 0), (parts - 2, 1, 1), (1, 0, 1)]
    for alike, coming, going in kinds:
        slices = (coming + going) * inside / between.steps
        steps += [
            replace(
                one,
                count=alike * one.count,
                intra=slices if coming or going else None,
                reduced=one.reduced + coming * inside / between.steps,
            )
            for one in between.parts
        ]
    steps.append(Steps(1, inside))
    return Cost(
        tuple(steps),
        parts * (2 * inside + between.wire_bytes),
        parts * between.wire_bytes,
    )


def schedule_with(flat: Plan, parts: int = 1) -> Plan:
    """Returns the messages of an all-reduce in so many parts, with a flat algorithm between the nodes."""

    def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
        local = machine.local(ranks)
        between = flat(collective, machine.nodes(ranks), machine.spread())
        slices = sum(map(len, between.phases))
        plan = Schedule(ranks, parts * between.pieces * slices * local)
        pieces = _Pieces(between.pieces, slices, local)
        every = range(slices)
        plan.phase([_inside(plan, pieces, 0, every, reduces=True)])
        for part in range(parts):
            at = 0
            for phase in between.phases:
                steps = []
                for step in phase:
                    transfers = pieces.between(step, part)
                    if part + 1 < parts:
                        transfers += _inside(plan, pieces, part + 1, [at], reduces=True)
                    if part > 0:
                        transfers += _inside(plan, pieces, part - 1, [at], reduces=False)
                    steps.append(transfers)
                    at += 1
                plan.phase(steps)
        plan.phase([_inside(plan, pieces, parts - 1, every, reduces=False)])
        return plan

    return schedule


class _Pieces:
    """Numbers of pieces: by part, piece of the flat algorithm, slice, and place in the node of who reduces it."""

    def __init__(self, flat: int, slices: int, local: int) -> None:
        self._flat, self._slices, self.local = flat, slices, local

    def number(self, part: int, piece: int, cut: int, place: int) -> int:
        return ((part * self._flat + piece) * self._slices + cut) * self.local + place

    def of_slices(self, part: int, place: int, cuts: range | list[int]) -> tuple[int, ...]:
        return tuple(
            self.number(part, piece, cut, place) for piece in range(self._flat) for cut in cuts
        )

    def between(self, step: list[Transfer], part: int) -> list[Transfer]:
        """The flat algorithm's step, for each place in the nodes."""
        return [
            Transfer(
                transfer.source * self.local + place,
                transfer.target * self.local + place,
                tuple(
                    self.number(part, piece, cut, place)
                    for piece in transfer.pieces
                    for cut in range(self._slices)
                ),
                transfer.reduces,
            )
            for transfer in step
            for place in range(self.local)
        ]


def _inside(
    plan: Schedule, pieces: _Pieces, part: int, cuts: range | list[int], *, reduces: bool
) -> list[Transfer]:
    """Slices of a part in each node: everybody's to who reduces them, or from there to everybody."""
    local = pieces.local
    return [
        Transfer(
            first + source,
            first + target,
            pieces.of_slices(part, target if reduces else source, cuts),
            reduces,
        )
        for first in range(0, plan.ranks, local)
        for source in range(local)
        for target in range(local)
        if source != target
    ]
