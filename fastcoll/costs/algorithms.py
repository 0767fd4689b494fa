"""All algorithms that have a model, by collective and name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastcoll.costs import (
    broadcast,
    direct,
    double_tree,
    hierarchical,
    pairwise,
    pipelined,
    powers,
    ring,
)
from fastcoll.costs.cost import Cost
from fastcoll.costs.machine import Machine, Number
from fastcoll.costs.schedule import Schedule

__all__ = ["ALGORITHMS", "Algorithm"]


def _always(ranks: int, machine: Machine) -> str:
    return ""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of one collective and its model.

    The formulas are Python expressions in the words of the package's docstring, with log2, and k the segments of the
    tree or chain, p the parts of a pipeline, 2 or more. They hold for powers of two: of 4 or more ranks in one node (n)
    or, hierarchical and pipelined ones, 4 or more nodes (N).

    Attributes:
        name: Of the algorithm.
        steps: Formula.
        wire_bytes: Formula; the most that any rank sends.
        time: Formula, without the time of the call; of flat algorithms in one node.
        source: Where it is described.
        cost: Of (ranks, bytes of the message, machine).
        schedule: Of (collective, ranks, machine); for small numbers.
        unsupported: Of (ranks, machine): why there is no model, or "".
    """

    name: str
    steps: str
    wire_bytes: str
    time: str
    source: str
    cost: Callable[[int, Number, Machine], Cost]
    schedule: Callable[[str, int, Machine], Schedule]
    unsupported: Callable[[int, Machine], str] = _always


_PATARASUK = "Patarasuk, Yuan 2009"
_CHAN = "Chan et al. 2007"
_THAKUR = "Thakur, Rabenseifner, Gropp 2005"
_RABENSEIFNER = "Rabenseifner 2004"
_SANDERS = "Sanders, Speck, Träff 2009"
_JIA = "Jia et al. 2018"
_PJESIVAC = "Pjesivac-Grbovic et al. 2007"

_FLAT = {
    "all_reduce": [
        Algorithm(
            "ring", "2*(n-1)", "2*(n-1)/n*S", "2*(n-1)*a + 2*(n-1)/n*S*b + (n-1)/n*S*c",
            _PATARASUK, ring.all_reduce, ring.schedule,
        ),
        Algorithm(
            "tree", "2*(log2(n)+k-1)", "2*S", "2*(log2(n)+k-1)*a + (log2(n)+k-1)/k*S*(2*b+c)",
            _SANDERS, double_tree.all_reduce, double_tree.schedule,
        ),
        Algorithm(
            "recursive_doubling", "log2(n)", "log2(n)*S", "log2(n)*(a + S*(b+c))",
            _THAKUR, powers.doubling, powers.doubling_schedule, powers.unsupported,
        ),
        Algorithm(
            "halving_doubling", "2*log2(n)", "2*(n-1)/n*S", "2*log2(n)*a + 2*(n-1)/n*S*b + (n-1)/n*S*c",
            _RABENSEIFNER, powers.halving_doubling, powers.schedule, powers.unsupported,
        ),
        Algorithm(
            "one_shot", "1", "(n-1)*S", "a + (n-1)*S*(b+c)",
            _CHAN, direct.one_shot, direct.one_shot_schedule, direct.unsupported,
        ),
        Algorithm(
            "two_shot", "2", "2*(n-1)/n*S", "2*a + 2*(n-1)/n*S*b + (n-1)/n*S*c",
            _CHAN, direct.two_shot, direct.schedule, direct.unsupported,
        ),
        Algorithm(
            "pairwise", "2*(n-1)", "2*(n-1)/n*S", "2*(n-1)*a + 2*(n-1)/n*S*b + (n-1)/n*S*c",
            _THAKUR, pairwise.all_reduce, pairwise.schedule,
        ),
    ],
    "reduce_scatter": [
        Algorithm(
            "ring", "n-1", "(n-1)/n*S", "(n-1)*a + (n-1)/n*S*(b+c)",
            _PATARASUK, ring.reduce_scatter, ring.schedule,
        ),
        Algorithm(
            "recursive_halving", "log2(n)", "(n-1)/n*S", "log2(n)*a + (n-1)/n*S*(b+c)",
            _THAKUR, powers.reduce_scatter, powers.schedule, powers.unsupported_halves,
        ),
        Algorithm(
            "direct", "1", "(n-1)/n*S", "a + (n-1)/n*S*(b+c)",
            _CHAN, direct.reduce_scatter, direct.schedule, direct.unsupported,
        ),
        Algorithm(
            "pairwise", "n-1", "(n-1)/n*S", "(n-1)*a + (n-1)/n*S*(b+c)",
            _THAKUR, pairwise.reduce_scatter, pairwise.schedule,
        ),
    ],
    "all_gather": [
        Algorithm(
            "ring", "n-1", "(n-1)/n*S", "(n-1)*a + (n-1)/n*S*b",
            _PATARASUK, ring.all_gather, ring.schedule,
        ),
        Algorithm(
            "recursive_doubling", "log2(n)", "(n-1)/n*S", "log2(n)*a + (n-1)/n*S*b",
            _THAKUR, powers.all_gather, powers.schedule, powers.unsupported_halves,
        ),
        Algorithm(
            "direct", "1", "(n-1)/n*S", "a + (n-1)/n*S*b",
            _CHAN, direct.all_gather, direct.schedule, direct.unsupported,
        ),
        Algorithm(
            "pairwise", "n-1", "(n-1)/n*S", "(n-1)*a + (n-1)/n*S*b",
            _THAKUR, pairwise.all_gather, pairwise.schedule,
        ),
    ],
    "broadcast": [
        Algorithm(
            "flat", "1", "(n-1)*S", "a + (n-1)*S*b",
            _PJESIVAC, broadcast.flat, broadcast.flat_schedule, broadcast.unsupported,
        ),
        Algorithm(
            "scatter_all_gather", "2", "S", "2*a + (1+(n-2)/(n-1))*S*b",
            _CHAN, broadcast.scatter_all_gather, broadcast.scatter_all_gather_schedule, broadcast.unsupported,
        ),
        Algorithm(
            "chain", "n+k-2", "S", "(n+k-2)*(a + S/k*b)",
            _PJESIVAC, broadcast.chain, broadcast.chain_schedule,
        ),
    ],
}  # fmt: skip

_IN_NODE = {
    "all_reduce": ("2", "2*a + 2*(R-1)/R*S*b + (R-1)/R*S*c"),
    "reduce_scatter": ("1", "a + (R-1)/R*S*(b+c)"),
    "all_gather": ("1", "a + (R-1)/R*S*b"),
}


def _between(formula: str) -> str:
    """Returns a flat algorithm's formula for what is left between the nodes."""
    for old, new in (("a", "A"), ("b", "B"), ("n", "N"), ("S", "(S/R)")):
        formula = formula.replace(old, new)
    return formula


def _unsupported_with(flat: Algorithm) -> Callable[[int, Machine], str]:
    def unsupported(ranks: int, machine: Machine) -> str:
        return hierarchical.unsupported(ranks, machine) or flat.unsupported(
            machine.nodes(ranks), machine.spread()
        )

    return unsupported


def _hierarchical(collective: str, flat: Algorithm) -> Algorithm:
    steps, time = _IN_NODE[collective]
    return Algorithm(
        f"hierarchical_{flat.name}",
        f"{steps} + {_between(flat.steps)}",
        f"{steps}*(R-1)/R*S + {_between(flat.wire_bytes)}",
        f"{time} + {_between(flat.time)}",
        f"{_JIA}; {flat.source}",
        hierarchical.cost_with(flat.cost, collective),
        hierarchical.schedule_with(flat.schedule),
        _unsupported_with(flat),
    )


_CHO = "Cho et al. 2019"

# Of a step: what a slice of a part takes in the node, beside what the flat algorithm does between nodes.
_OVERLAPPED = {
    "ring": (
        "2*(N-1)",
        "2*(N-1)*max(A + S/(R*N*p)*B, a + {q}*(R-1)/R*S/(p*2*(N-1))*b)",
    ),
    "halving_doubling": (
        "2*log2(N)",
        "2*sum(max(A + S/(R*p*2**i)*B, a + {q}*(R-1)/R*S/(p*2*log2(N))*b) for i in range(1, log2(N)+1))",
    ),
}


def _pipelined(flat: Algorithm) -> Algorithm:
    steps, overlapped = _OVERLAPPED[flat.name]
    ends = "2*a + 2*(R-1)/R*S/p*b"
    sums = "((R-1)/R*S + (N-1)/N*S/R)*c"
    return Algorithm(
        f"pipelined_{flat.name}",
        f"2 + p*{steps}",
        f"2*(R-1)/R*S + {_between(flat.wire_bytes)}",
        f"{ends} + 2*{overlapped.format(q=1)} + (p-2)*{overlapped.format(q=2)} + {sums}",
        f"{_CHO}; {flat.source}",
        pipelined.cost_with(flat.cost),
        pipelined.schedule_with(flat.schedule),
        _unsupported_with(flat),
    )


_ACROSS = ("ring", "tree", "halving_doubling", "recursive_halving", "recursive_doubling")

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    collective: {
        algorithm.name: algorithm
        for algorithm in (
            *flat,
            *(_hierarchical(collective, one) for one in flat if one.name in _ACROSS),
            *(
                _pipelined(one)
                for one in flat
                if collective == "all_reduce" and one.name in _OVERLAPPED
            ),
        )
    }
    for collective, flat in _FLAT.items()
}
"""By collective and name; of the collectives that gradients and sharded parameters need, and broadcast."""
