"""Exchanges between ranks whose numbers differ in one bit: recursive doubling, and halving with doubling.

recursive_doubling: log2(n) steps, in each the whole sum so far goes both ways.
    Bytes: log2(n) S. Time in a node: log2(n) (a + S (b + c)).
halving_doubling: a reduce-scatter in which what is exchanged is halved and the distance doubled, then an all-gather
    the other way round; the large messages go to near ranks.
    Steps: 2 log2(n). Bytes: 2 (n - 1) / n S. Time in a node: 2 log2(n) a + 2 (n - 1) / n S b + (n - 1) / n S c.
Other numbers of ranks: with p the power of two below, n - p ranks first give their message to a partner, and get the
    result from it: two steps and S bytes more. Not for reduce_scatter and all_gather.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005); Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = [
    "all_gather",
    "doubling",
    "doubling_schedule",
    "halving_doubling",
    "reduce_scatter",
    "schedule",
    "unsupported",
    "unsupported_halves",
]


def unsupported(ranks: int, machine: Machine) -> str:
    """Returns why all_reduce is not modelled, or ""."""
    local = machine.local(ranks)
    if machine.nodes(ranks) > 1 and local & (local - 1):
        return f"{local} ranks of a node are no power of two"
    return ""


def unsupported_halves(ranks: int, machine: Machine) -> str:
    """Returns why reduce_scatter and all_gather are not modelled, or ""."""
    if ranks & (ranks - 1):
        return f"{ranks} ranks are no power of two"
    return unsupported(ranks, machine)


def doubling(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of an all-reduce by recursive doubling."""
    exchanges = [(distance, size, size) for distance in _distances(ranks)]
    return _folded(ranks, size, machine, exchanges)


def halving_doubling(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of an all-reduce by recursive halving and doubling."""
    halving = _halving(ranks, size)
    return _folded(
        ranks, size, machine, halving + [(distance, sent, 0) for distance, sent, _ in halving[::-1]]
    )


def reduce_scatter(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of recursive halving."""
    return _folded(ranks, size, machine, _halving(ranks, size))


def all_gather(ranks: int, size: Number, machine: Machine) -> Cost:
    """Returns the cost of recursive doubling of what is known."""
    return _folded(
        ranks, size, machine, [(distance, sent, 0) for distance, sent, _ in _halving(ranks, size)]
    )


def _distances(ranks: int) -> list[int]:
    return [1 << bit for bit in range(ranks.bit_length() - 1)]


def _halving(ranks: int, size: Number) -> list[tuple[int, Number, Number]]:
    return [
        (distance, size / (2 * distance), size / (2 * distance)) for distance in _distances(ranks)
    ]


def _folded(
    ranks: int, size: Number, machine: Machine, exchanges: list[tuple[int, Number, Number]]
) -> Cost:
    """Of (distance, bytes sent, bytes reduced), between the steps for the ranks beyond a power of two."""
    crosses = machine.nodes(ranks) > 1
    parts = []
    wire: Number = 0
    inter: Number = 0
    for distance, sent, reduced in exchanges:
        far = distance >= machine.per_node and crosses
        parts.append(Steps(1, None if far else sent, sent if far else None, reduced))
        wire += sent
        inter += sent if far else 0
    if ranks & (ranks - 1):
        intra_size, inter_size = (None, size) if crosses else (size, None)
        parts.insert(0, Steps(1, intra_size, inter_size, size))
        parts.append(Steps(1, intra_size, inter_size))
        wire += size
        inter += size if crosses else 0
    return Cost(tuple(parts), wire, inter)


def doubling_schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of an all-reduce by recursive doubling."""
    distances = _distances(ranks)
    plan = Schedule(ranks, 1)
    _fold(plan, reduces=True)
    for distance in distances:
        plan.phase(
            [[Transfer(rank, rank ^ distance, (0,), True) for rank in range(1 << len(distances))]]
        )
    _fold(plan, reduces=False)
    return plan


def schedule(collective: str, ranks: int, machine: Machine) -> Schedule:
    """Returns the messages of halving with doubling, or of one of its halves."""
    distances = _distances(ranks)
    core = 1 << len(distances)
    plan = Schedule(ranks, core)
    if collective != "all_gather":
        _fold(plan, reduces=True)
        for distance in distances:
            # A rank keeps the pieces whose number ends in the same bits as its own.
            plan.phase(
                [
                    [
                        Transfer(r, r ^ distance, _alike(r ^ distance, 2 * distance, core), True)
                        for r in range(core)
                    ]
                ]
            )
    if collective != "reduce_scatter":
        for distance in distances[::-1]:
            plan.phase(
                [
                    [
                        Transfer(r, r ^ distance, _alike(r, 2 * distance, core), False)
                        for r in range(core)
                    ]
                ]
            )
        _fold(plan, reduces=False)
    return plan


def _alike(rank: int, modulus: int, pieces: int) -> tuple[int, ...]:
    return tuple(range(rank % modulus, pieces, modulus))


def _fold(plan: Schedule, *, reduces: bool) -> None:
    """The ranks beyond the power of two give their message away, or get the result."""
    core = 1 << (plan.ranks.bit_length() - 1)
    extra = range(core, plan.ranks)
    pieces = tuple(range(plan.pieces))
    if reduces:
        step = [Transfer(rank, rank - core, pieces, True) for rank in extra]
    else:
        step = [Transfer(rank - core, rank, pieces, False) for rank in extra]
    plan.phase([step] if step else [])
