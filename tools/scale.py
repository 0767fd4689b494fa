"""The time of an all-reduce at scale, by closed forms: the table of docs/benchmarks/at-scale.md.

Nothing here was measured. A step that sends m bytes takes a + m b; a is a link's latency, b its seconds per byte
(Hockney, Parallel Computing 20, 1994). A reduced byte takes c seconds (Thakur, Rabenseifner, Gropp, Int. J. High
Performance Computing Applications 19, 2005). There are n ranks, R on each of N nodes, and S bytes of the message. The
link is that in the node, or between nodes. All ranks go step by step, and a rank sends and receives at once.

    ring           2 (n-1) (a + S/n b) + (n-1)/n S c          Patarasuk, Yuan, J. Parallel Distrib. Comput. 69, 2009
    double_tree    2 (h+k-1) (a + S/k b) + (h+k-1) S/k c      Sanders, Speck, Traeff, Parallel Computing 35, 2009
                   h = ceil(log2 n); k segments, the best number of them
    one_shot       a + (n-1) S (b + c)                        Chan et al., Concurrency Computat. 19, 2007
    two_shot       2 (a + (n-1)/n S b) + (n-1)/n S c          the same
    hierarchical   two_shot in each node around another form  Jia et al., arXiv:1807.11205, 2018
                   between nodes, of S/R bytes on N ranks

A ring over several nodes has R parts, so each rank's card carries S/R. Every step then waits for the slower link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import repository  # noqa: F401  before fastcoll

from fastcoll.bench.sizes import parse_size
from fastcoll.bench.table import markdown

__all__ = [
    "HGX_H200",
    "Link",
    "Machine",
    "double_tree",
    "hierarchical",
    "one_shot",
    "predictions",
    "ring",
    "table",
    "two_shot",
]


@dataclass(frozen=True)
class Link:
    """A rank's link: seconds until the first byte arrives, and seconds for each byte."""

    latency: float
    per_byte: float

    def step(self, size: float) -> float:
        """Returns the seconds of a step that sends `size` bytes."""
        return self.latency + size * self.per_byte


@dataclass(frozen=True)
class Machine:
    """Nodes of equally many ranks.

    Attributes:
        intra: A rank's link in its node, to all its ranks at once.
        inter: A rank's link to other nodes.
        per_node: Ranks of a node.
        per_reduced_byte: Seconds to add a received byte to a local one.
        call: Seconds of a call before its first step.
    """

    intra: Link
    inter: Link
    per_node: int
    per_reduced_byte: float
    call: float = 0.0

    def nodes(self, ranks: int) -> int:
        """Returns the number of nodes of `ranks` ranks."""
        return -(-ranks // self.per_node)


Form = Callable[[int, float, Machine], float]
"""(ranks, bytes of the message, machine) -> seconds."""


def ring(ranks: int, size: float, machine: Machine) -> float:
    """Returns the seconds of a ring of all ranks."""
    chunk, steps = size / ranks, 2 * (ranks - 1)
    nodes, local = machine.nodes(ranks), min(ranks, machine.per_node)
    if nodes == 1:
        step = machine.intra.step(chunk)
    else:
        inside = machine.intra.step((local - 1) * chunk / local) if local > 1 else 0.0
        step = max(inside, machine.inter.step(chunk / local))
    return steps * step + (ranks - 1) * chunk * machine.per_reduced_byte


def double_tree(ranks: int, size: float, machine: Machine) -> float:
    """Returns the seconds of two trees, each for half of the message, with the best number of segments."""
    if ranks == 1:
        return 0.0
    link = machine.intra if machine.nodes(ranks) == 1 else machine.inter
    height = (ranks - 1).bit_length()
    # Children of the busiest rank in each step, of half a message each.
    widest = 2 if ranks > 3 else 1

    def seconds(segments: int) -> float:
        busiest = widest * size / (2 * segments)
        reduced = busiest * machine.per_reduced_byte
        return (height + segments - 1) * (2 * link.step(busiest) + reduced)

    per_byte = widest / 2 * (2 * link.per_byte + machine.per_reduced_byte)
    near = math.isqrt(int((height - 1) * size * per_byte / (2 * link.latency)))
    return min(map(seconds, {1, max(1, near), near + 1}))


def one_shot(ranks: int, size: float, machine: Machine) -> float:
    """Returns the seconds if each rank reads all messages; on one node."""
    read = (ranks - 1) * size
    return machine.intra.step(read) + read * machine.per_reduced_byte


def two_shot(ranks: int, size: float, machine: Machine) -> float:
    """Returns the seconds if each rank reduces its share and reads the other shares; on one node."""
    share = (ranks - 1) * size / ranks
    return 2 * machine.intra.step(share) + share * machine.per_reduced_byte


def hierarchical(between: Form, ranks: int, size: float, machine: Machine) -> float:
    """Returns the seconds of two_shot in the nodes, with another form of a share between them."""
    local = machine.per_node
    one_each = replace(machine, per_node=1)
    return two_shot(local, size, machine) + between(machine.nodes(ranks), size / local, one_each)


# 18 NVLink 4 links of 20.6 GB/s each way (src/graph/topo.h), one ConnectX-7 of 400 Gbit/s for each GPU, 4.8 TB/s
# (data sheets), of which reducing a byte reads two and writes one. Latencies in and between nodes, and usable shares of
# a link, of LL, LL128 and Simple, and the call's: src/graph/tuning.cc. NVIDIA/nccl 5067397c (2.30.7).
HGX_H200 = [
    Machine(
        Link(intra, 1 / (18 * 20.6e9 * share)),
        Link(inter, 1 / (400e9 / 8 * share)),
        per_node=8,
        per_reduced_byte=3 / 4.8e12,
        call=6.6e-6,
    )
    for intra, inter, share in (
        (0.6e-6, 5.0e-6, 0.5),
        (1.9e-6, 8.5e-6, 0.92),
        (3.4e-6, 14.0e-6, 1.0),
    )
]
"""8 H200 on an NVSwitch under each protocol: an assumption about a common node, not measured."""

CPU = Machine(Link(1e-6, 1 / 8e9), Link(1e-6, 1 / 8e9), per_node=64, per_reduced_byte=1 / 8e9)
"""Ranks of one host on CPU. Assumed: each has its own core, which copies 8 GB/s and reads a new flag after 1 us."""


def predictions(ranks: int, size: float, machines: Sequence[Machine]) -> dict[str, float]:
    """Returns the microseconds of each algorithm that can serve `ranks` ranks, under the best protocol for it."""
    forms: dict[str, Form] = {"ring": ring, "double_tree": double_tree}
    if machines[0].nodes(ranks) == 1:
        forms = {"one_shot": one_shot, "two_shot": two_shot, **forms}
    else:
        around = {
            f"hierarchical, {name}": partial(hierarchical, form) for name, form in forms.items()
        }
        forms = {**around, **forms}
    return {
        name: min((one.call + form(ranks, size, one)) * 1e6 for one in machines)
        for name, form in forms.items()
    }


def table() -> list[str]:
    """Returns the lines of the table, in Markdown."""
    hosts = (
        ("H200", HGX_H200, (8, 64, 1024, 16384), ("64 KiB", "1 MiB", "32 MiB", "1 GiB")),
        ("CPU, one host", [CPU], (2, 8, 64), ("4 KiB", "1 MiB", "256 MiB")),
    )
    rows = []
    for kind, machines, counts, sizes in hosts:
        for ranks, size in itertools.product(counts, sizes):
            found = predictions(ranks, parse_size(size), machines)
            best = min(found, key=lambda name: found[name])
            rows.append(
                [kind, str(ranks), size, best, f"{found[best]:.1f}", f"{found['ring']:.1f}"]
            )
    return markdown("ranks on | ranks | message | cheapest | us | ring, us", rows)
