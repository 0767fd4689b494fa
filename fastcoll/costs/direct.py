"""Direct: every rank reads from all others at once, as over NVSwitch; or sends to them, where each has a node.

Phases: one_shot: every rank reads all messages and reduces them. two_shot: every rank reads its chunk of all messages
        and reduces it, then reads the other reduced chunks. direct: one of these two halves.
Steps:  one_shot 1, two_shot 2, direct 1.
Bytes:  one_shot (n - 1) S, two_shot 2 (n - 1) / n S, direct (n - 1) / n S.
Time in a node: one_shot a + (n - 1) S (b + c); two_shot 2 a + 2 (n - 1) / n S b + (n - 1) / n S c.
Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience",
Concurrency Computat.: Pract. Exper. 19 (2007), with all messages of a step at once, as every rank maps all others'
memory: that is why there is no model for several nodes of several ranks. Each sum is made by one rank, with one
rounding.
"""

from __future__ import annotations

from collections.abc import Callable

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = [
    "all_gather",
    "one_shot",
    "one_shot_schedule",
    "reduce_scatter",
    "schedule",
    "two_shot",
    "unsupported",
]


def unsupported(ranks: int, machine: Machine) -> str:
    """Returns why there is no model, or ""."""
    nodes = machine.nodes(ranks)
    mixed = nodes > 1 and machine.per_node > 1
    return f"the ranks of {nodes} nodes do not map each other's memory" if mixed else ""


def one_shot(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of an all-reduce in one step."""
    return _cost(ranks, size, machine, (size,))


def two_shot(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of an all-reduce in two steps."""
    return _cost(ranks, size / ranks, machine, (size / ranks, 0))


def reduce_scatter(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the first step of two_shot."""
    return _cost(ranks, size / ranks, machine, (size / ranks,))


def all_gather(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of the second step of two_shot."""
    return _cost(ranks, size / ranks, machine, (0,))


def _cost(ranks: int, read: Number, machine: Machine, reduced: tuple[Number, ...]) -> Cost:
    """A step for each entry of `reduced`; `read` is what a rank reads of each other one in a step."""
    if reason := unsupported(ranks, machine):
        raise ValueError(f"fastcoll.costs.direct: {reason}")
    if ranks == 1:
        return Cost((), 0)
    sent = (ranks - 1) * read
    crosses = machine.nodes(ranks) > 1
    intra, inter = (None, sent) if crosses else (sent, None)
    parts = tuple(Steps(1, intra, inter, (ranks - 1) * size) for size in reduced)
    return Cost(parts, len(parts) * sent, len(parts) * sent if crosses else 0)


def one_shot_schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of one_shot."""
    plan = Schedule(ranks, 1)
    if ranks > 1:
        plan.phase([_everybody(ranks, lambda source, target: 0, True)])
    return plan


def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of two_shot (all_reduce) or of one of its halves."""
    plan = Schedule(ranks, ranks)
    if ranks > 1 and collective != "all_gather":
        plan.phase([_everybody(ranks, lambda source, target: target, True)])
    if ranks > 1 and collective != "reduce_scatter":
        plan.phase([_everybody(ranks, lambda source, target: source, False)])
    return plan


def _everybody(ranks: int, piece: Callable[[int, int], int], reduces: bool) -> list[Transfer]:
    return [
        Transfer(source, target, (piece(source, target),), reduces)
        for source in range(ranks)
        for target in range(ranks)
        if source != target
    ]
