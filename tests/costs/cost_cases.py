"""Machines with exact constants, and the algorithms as test cases."""

from fractions import Fraction

import pytest

from fastcoll.costs import ALGORITHMS, Link, Machine

__all__ = ["EVERY", "exact_machine", "placed"]

EVERY = [
    pytest.param(collective, algorithm, id=f"{collective}-{name}")
    for collective, algorithms in ALGORITHMS.items()
    for name, algorithm in algorithms.items()
]


def exact_machine(per_node=8, inter_latency=5, inter_bytes=7):
    """Return a machine of fractions; its prime numbers keep terms apart."""
    return Machine(
        Link(Fraction(3), Fraction(1, 11)),
        Link(Fraction(inter_latency), Fraction(1, inter_bytes)),
        per_node=per_node,
        reduce_seconds_per_byte=Fraction(1, 101),
        call=Fraction(2),
    )


def placed(ranks, per_node):
    """Tell whether the ranks are on one node, or fill theirs."""
    return ranks <= per_node or ranks % per_node == 0
