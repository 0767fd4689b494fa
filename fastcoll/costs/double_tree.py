"""Two binary trees, each for half of the message; who has children in one is a leaf in the other.

Phases: both halves are reduced towards the roots of their trees, in k segments each, then sent back down.
Steps:  2 (h + k - 1), h = ceil(log2(n)) the height of the trees.
Bytes:  2 S (n = 2: S). A rank sends half of the message up each tree, and down to two children in one of them.
Time in a node, from 4 ranks on: 2 (h + k - 1) a + (h + k - 1) / k S (2 b + c). k is the one that makes it least.
Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009); NCCL's "tree" is of this kind between nodes. There a rank serves one child after the other; here
both in one step.

The model knows no nodes: where there are several, every step is one between nodes. See `hierarchical` for the rest.
"""

from __future__ import annotations

import math

from fastcoll.costs.cost import Cost, Steps
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule, Transfer

__all__ = ["all_reduce", "best_segments", "parents", "schedule"]


def all_reduce(ranks: int, size: Number, machine: Machine, segments: int | None = None) -> Cost:
    """Returns the cost of an all-reduce.

    Args:
        ranks: n.
        size: Bytes of the message.
        machine: Where the ranks are.
        segments: k, of each half; None for the best.
    """
    if ranks == 1:
        return Cost((), 0)
    k = best_segments(ranks, size, machine) if segments is None else segments
    steps = height(ranks) + k - 1
    crosses = machine.nodes(ranks) > 1
    busiest = _width(ranks, k) * size / (2 * k)
    intra, inter = (None, busiest) if crosses else (busiest, None)
    parts = (Steps(steps, intra, inter, busiest), Steps(steps, intra, inter))
    sent = _sent(ranks, size)
    return Cost(parts, sent, sent if crosses else 0)


def height(ranks: int) -> int:
    """Returns h: how many edges the longest way from a root has."""
    return (ranks - 1).bit_length()


def _width(ranks: int, segments: int) -> int:
    """Segments that the busiest rank deals with in a step: those of two children, if any rank has two."""
    return 2 if ranks > 3 or (ranks == 3 and segments > 1) else 1


def _sent(ranks: int, size: Number) -> Number:
    if ranks == 2:
        return size
    return 3 * size / 2 if ranks == 3 else 2 * size


def best_segments(ranks: int, size: Number, machine: Machine) -> int:
    """Returns the k of the shortest time."""
    link = machine.inter if machine.nodes(ranks) > 1 else machine.intra

    def seconds(k: int) -> Number:
        return all_reduce(ranks, size, machine, k).seconds(machine)

    # Of 2 (h - 1 + k) a + (h - 1 + k) / k X with X = S (2 b + c) or half of it.
    waste = (
        (height(ranks) - 1) * size * (2 * link.seconds_per_byte + machine.reduce_seconds_per_byte)
    )
    near = math.isqrt(int(waste / (2 * link.latency)))
    candidates = {1, max(2, near), max(2, near + 1)}
    return min(sorted(candidates), key=seconds)


def parents(ranks: int) -> list[dict[int, int]]:
    """Returns the parent of each rank but the root, for both trees.

    The first is in order: its root is rank 0, with one child, below which whatever is left of a rank has smaller
    numbers. Odd places are leaves. The second is the first one mirrored, or moved by one where n is odd, so that
    the others are.
    """
    first: dict[int, int] = {}
    _hang(first, 1, ranks, 0)
    swapped = [ranks - 1 - at if ranks % 2 == 0 else (at + 1) % ranks for at in range(ranks)]
    return [first, {swapped[child]: swapped[parent] for child, parent in first.items()}]


def _hang(tree: dict[int, int], first: int, end: int, parent: int) -> None:
    """Hangs the places from `first` up to `end` below a parent, the left part of them full."""
    if first >= end:
        return
    top = first - 1 + (1 << ((end - first).bit_length() - 1))
    tree[top] = parent
    _hang(tree, first, top, top)
    _hang(tree, top + 1, end, top)


def schedule(collective: str, ranks: int, machine: Machine, segments: int = 1) -> Schedule:
    """Returns the messages of an all-reduce with so many segments of each half."""
    plan = Schedule(ranks, 2 * segments)
    if ranks == 1:
        return plan
    steps = height(ranks) + segments - 1
    up: list[list[Transfer]] = [[] for _ in range(steps)]
    down: list[list[Transfer]] = [[] for _ in range(steps)]
    for half, tree in enumerate(parents(ranks)):
        for child, parent in tree.items():
            depth = _depth(tree, child)
            for segment in range(segments):
                piece = (half * segments + segment,)
                up[height(ranks) - depth + segment].append(Transfer(child, parent, piece, True))
                down[depth - 1 + segment].append(Transfer(parent, child, piece, False))
    plan.phase(up)
    plan.phase(down)
    return plan


def _depth(tree: dict[int, int], rank: int) -> int:
    depth = 0
    while rank in tree:
        rank, depth = tree[rank], depth + 1
    return depth
