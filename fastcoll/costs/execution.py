"""Executes a schedule on integers: whether the result is right, and what was sent for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["execute"]

_DIGIT_BITS = (
    16  # a rank's contribution is a digit of its own: one that was added twice cannot hide
)


def execute(schedule: Schedule, collective: str, size: Fraction | int, machine: Machine) -> Cost:
    """Plays a collective, and counts.

    Args:
        schedule: What to play.
        collective: "all_reduce", "reduce_scatter", "all_gather" or "broadcast" (from rank 0).
        size: Bytes of the message.
        machine: Where the ranks are.

    Returns:
        What was sent, step by step; exact.

    Raises:
        ValueError: A rank has another result than it should, or the collective is none of these.
    """
    memory = [_start(schedule, collective, rank) for rank in range(schedule.ranks)]
    piece = Fraction(size) / schedule.pieces
    sent: Counter[int] = Counter()
    crossed: Counter[int] = Counter()
    parts = []
    for phase in schedule.phases:
        for step in phase:
            _deliver(memory, step)
            for transfer in step:
                sent[transfer.source] += len(transfer.pieces)
                if _crosses(transfer, machine):
                    crossed[transfer.source] += len(transfer.pieces)
        parts.append(
            Steps(
                len(phase),
                _busiest(phase, piece, machine, crossing=False),
                _busiest(phase, piece, machine, crossing=True),
                max(_reduced(step) for step in phase) * piece,
            )
        )
    for rank, found in enumerate(memory):
        expected = _end(schedule, collective, rank)
        wrong = [at for at, value in expected.items() if found[at] != value]
        if wrong:
            raise ValueError(
                f"fastcoll.costs.execute: {collective} of {schedule.ranks} ranks: rank {rank} has a wrong sum in "
                f"pieces {wrong[:5]}"
            )
    return Cost(
        tuple(parts),
        max(sent.values(), default=0) * piece,
        max(crossed.values(), default=0) * piece,
    )


def _value(rank: int, piece: int) -> int:
    return (piece + 1) << (_DIGIT_BITS * rank)


def _own(schedule: Schedule, rank: int) -> range:
    each = schedule.pieces // schedule.ranks
    return range(rank * each, (rank + 1) * each)


def _start(schedule: Schedule, collective: str, rank: int) -> list[int]:
    pieces = range(schedule.pieces)
    if collective == "all_gather":
        own = _own(schedule, rank)
        return [_value(rank, piece) if piece in own else 0 for piece in pieces]
    if collective == "broadcast" and rank > 0:
        return [0] * schedule.pieces
    return [_value(rank, piece) for piece in pieces]


def _end(schedule: Schedule, collective: str, rank: int) -> dict[int, int]:
    """Returns what a rank must have, by piece."""
    ranks, pieces = range(schedule.ranks), range(schedule.pieces)
    if collective == "all_gather":
        return {piece: _value(owner, piece) for owner in ranks for piece in _own(schedule, owner)}
    if collective == "broadcast":
        return {piece: _value(0, piece) for piece in pieces}
    if collective == "reduce_scatter":
        pieces = _own(schedule, rank)
    elif collective != "all_reduce":
        raise ValueError(
            f"fastcoll.costs.execute: expected all_reduce, reduce_scatter, all_gather or broadcast, got {collective!r}"
        )
    return {piece: sum(_value(other, piece) for other in ranks) for piece in pieces}


def _deliver(memory: list[list[int]], step: Iterable[Transfer]) -> None:
    """All messages of a step are read before any is written."""
    under_way = [
        (transfer, [memory[transfer.source][piece] for piece in transfer.pieces])
        for transfer in step
    ]
    for transfer, values in under_way:
        target = memory[transfer.target]
        for piece, value in zip(transfer.pieces, values, strict=True):
            target[piece] = target[piece] + value if transfer.reduces else value


def _crosses(transfer: Transfer, machine: Machine) -> bool:
    return transfer.source // machine.per_node != transfer.target // machine.per_node


def _busiest(
    phase: list[list[Transfer]], piece: Fraction, machine: Machine, *, crossing: bool
) -> Fraction | None:
    """Returns the most bytes that a rank sends, or receives, over one kind of link in a step."""
    most: int | None = None
    for step in phase:
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for transfer in step:
            if _crosses(transfer, machine) == crossing:
                out[transfer.source] += len(transfer.pieces)
                into[transfer.target] += len(transfer.pieces)
        if out:
            most = max(most or 0, *out.values(), *into.values())
    return None if most is None else most * piece


def _reduced(step: Iterable[Transfer]) -> int:
    added: Counter[int] = Counter()
    for transfer in step:
        if transfer.reduces:
            added[transfer.target] += len(transfer.pieces)
    return max(added.values(), default=0)
