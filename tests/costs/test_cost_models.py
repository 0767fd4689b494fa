"""What must hold of every formula, whatever the machine; and numbers that are known."""

import math
from fractions import Fraction

import pytest
from cost_cases import EVERY, exact_machine
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.costs import (
    ALGORITHMS,
    HGX_H200,
    Link,
    Machine,
    broadcast,
    double_tree,
    pipelined,
    predict,
)

pytestmark = pytest.mark.full

whole = st.integers(1, 10**6)
sizes = st.builds(Fraction, st.integers(0, 1 << 34), st.integers(1, 3))


@st.composite
def machines(draw, per_node):
    latency, pace = draw(whole), Fraction(draw(whole), 1009)
    return Machine(
        Link(latency, pace),
        Link(latency + draw(whole), pace + draw(whole)),
        per_node=per_node,
        reduce_seconds_per_byte=Fraction(draw(st.integers(0, 100)), 7),
        call=draw(st.integers(0, 10)),
    )


def shapes(algorithm):
    """Return the (ranks, ranks per node) that an algorithm can serve."""
    return [
        (ranks, per_node)
        for per_node in (1, 2, 3, 4, 8, 72)
        for ranks in (
            *range(1, per_node),
            *(n * per_node for n in (1, 2, 3, 4, 5, 8, 64, 100, 2048)),
        )
        if not algorithm.unsupported(ranks, exact_machine(per_node))
    ]


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@settings(max_examples=60)
@given(data=st.data())
def test_bounds(collective, algorithm, data):
    ranks, per_node = data.draw(st.sampled_from(shapes(algorithm)))
    machine, size, more = data.draw(machines(per_node)), data.draw(sizes), data.draw(sizes)
    cost = algorithm.cost(ranks, size, machine)
    phases = 2 if collective == "all_reduce" else 1
    least = phases * Fraction(ranks - 1, ranks) * size
    # Somebody sends at least the mean of what all must receive.
    assert cost.wire_bytes >= least
    assert 0 <= cost.inter_bytes <= cost.wire_bytes
    seconds = cost.seconds(machine)
    # A rank's two ports may be busy at once.
    fastest = 1 / (1 / machine.intra.seconds_per_byte + 1 / machine.inter.seconds_per_byte)
    assert seconds >= machine.call + cost.steps * machine.intra.latency
    assert seconds >= machine.call + least * fastest
    assert cost.steps >= (ranks > 1)
    # Monotone in the bytes.
    larger = algorithm.cost(ranks, size + more, machine)
    assert larger.seconds(machine) >= seconds
    assert larger.wire_bytes >= cost.wire_bytes


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_one_rank_sends_nothing(collective, algorithm):
    machine = exact_machine()
    if algorithm.name.startswith(("hierarchical", "pipelined")):
        assert algorithm.unsupported(1, machine) == "one node"
        return
    cost = algorithm.cost(1, 1024, machine)
    assert (cost.steps, cost.wire_bytes, cost.seconds(machine)) == (0, 0, machine.call)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("per_node", [4, 8, 64])
def test_printed_formulas_are_those_of_the_code(collective, algorithm, per_node):
    across = algorithm.name.startswith(("hierarchical", "pipelined"))
    size, machine = Fraction(1 << 20), exact_machine(per_node)
    for nodes in (4, 16) if across else (1,):
        ranks = nodes * per_node
        cost = algorithm.cost(ranks, size, machine)
        k = 1
        if algorithm.name.endswith("tree"):
            share, seen = (size / per_node, machine.spread()) if across else (size, machine)
            k = double_tree.best_segments(nodes if across else ranks, share, seen)
            assert k > 1
        if algorithm.name == "chain":
            k = broadcast.best_segments(ranks, size, machine)
            assert k > 1
        p = 1
        if algorithm.name.startswith("pipelined"):
            flat = ALGORITHMS["all_reduce"][algorithm.name.removeprefix("pipelined_")]
            p = pipelined.best_parts(flat.cost, ranks, size, machine)
            assert p > 1
        words = {
            "p": p, "range": range, "sum": sum, "max": max, "Fraction": Fraction,
            "n": ranks, "N": nodes, "R": per_node, "S": size, "k": k,
            "a": machine.intra.latency, "b": machine.intra.seconds_per_byte,
            "A": machine.inter.latency, "B": machine.inter.seconds_per_byte,
            "c": machine.reduce_seconds_per_byte,
            "log2": lambda number: int(number).bit_length() - 1,
        }  # fmt: skip
        found = [
            Fraction(eval(formula.replace("/", "*Fraction(1)/"), words))
            for formula in (algorithm.steps, algorithm.wire_bytes, algorithm.time)
        ]
        assert found == [cost.steps, cost.wire_bytes, cost.seconds(machine) - machine.call]


@pytest.mark.parametrize(
    ("collective", "name", "ranks", "steps"),
    [
        ("all_reduce", "ring", 8, 14),
        ("all_reduce", "ring", 3, 4),
        ("all_reduce", "recursive_doubling", 8, 3),
        ("all_reduce", "recursive_doubling", 6, 4),
        ("all_reduce", "halving_doubling", 8, 6),
        ("all_reduce", "halving_doubling", 7, 6),
        ("all_reduce", "tree", 8, 6),
        ("all_reduce", "tree", 5, 6),
        ("all_reduce", "one_shot", 8, 1),
        ("all_reduce", "two_shot", 8, 2),
        ("all_reduce", "pairwise", 8, 14),
        ("all_reduce", "ring", 64, 126),
        ("all_reduce", "hierarchical_ring", 64, 2 + 14),
        ("all_reduce", "hierarchical_tree", 64, 2 + 6),
        ("all_reduce", "hierarchical_recursive_doubling", 64, 2 + 3),
        ("all_reduce", "hierarchical_halving_doubling", 64, 2 + 6),
        ("reduce_scatter", "direct", 8, 1),
        ("reduce_scatter", "ring", 8, 7),
        ("all_gather", "recursive_doubling", 8, 3),
        ("all_gather", "hierarchical_ring", 64, 1 + 7),
        ("broadcast", "flat", 8, 1),
        ("broadcast", "scatter_all_gather", 8, 2),
        ("broadcast", "scatter_all_gather", 2, 1),
        ("broadcast", "chain", 8, 7),
    ],
)
def test_latencies_of_an_empty_message(collective, name, ranks, steps):
    machine = exact_machine()
    assert ALGORITHMS[collective][name].cost(ranks, 0, machine).steps == steps


def test_a_ring_uses_every_network_card_and_a_pairwise_exchange_sends_all_of_it_out():
    machine, size, ranks = exact_machine(), Fraction(1 << 20), 64
    cost = {
        name: ALGORITHMS["all_reduce"][name].cost(ranks, size, machine).inter_bytes
        for name in ("ring", "pairwise", "hierarchical_ring")
    }
    assert cost["ring"] == Fraction(2 * 63, 64 * 8) * size
    assert cost["hierarchical_ring"] == Fraction(2 * 7, 8 * 8) * size
    assert cost["pairwise"] == Fraction(2 * 56, 64) * size


@pytest.mark.parametrize(
    ("best_segments", "cost"),
    [
        (double_tree.best_segments, double_tree.all_reduce),
        (broadcast.best_segments, broadcast.chain),
    ],
)
@settings(deadline=None)
@given(ranks=st.integers(2, 5000), size=st.integers(1, 1 << 30))
def test_the_best_number_of_segments_is_the_best(best_segments, cost, ranks, size):
    machine = exact_machine(per_node=1)
    best = best_segments(ranks, Fraction(size), machine)
    times = {
        k: cost(ranks, Fraction(size), machine, k).seconds(machine)
        for k in {1, 2, 3, max(1, best - 1), best, best + 1, 2 * best}
    }
    assert min(times.values()) == times[best]


@pytest.mark.parametrize(("ranks", "per_node", "match"), [(0, 8, "1 rank"), (12, 8, "got 12")])
def test_ranks_that_do_not_fill_nodes_are_refused(ranks, per_node, match):
    with pytest.raises(ValueError, match=match):
        predict("all_reduce", ranks, 8, HGX_H200)


@pytest.mark.parametrize(
    ("arguments", "match"), [(("scan", 8, 8), "'scan'"), (("all_reduce", 8, -1), "size")]
)
def test_other_questions_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        predict(*arguments, HGX_H200)


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (-1, 1), (math.nan, 1)])
def test_a_link_takes_time(values):
    with pytest.raises(ValueError, match=r"costs\.Link"):
        Link(*values)


def test_a_machine_that_is_none_is_refused():
    fast, slow = Link(1.0, 1.0), Link(2.0, 2.0)
    for arguments, match in (
        ({"intra": slow, "inter": fast}, "not slower"),
        ({"intra": fast, "inter": slow, "per_node": 0}, "per_node"),
        ({"intra": fast, "inter": slow, "call": -1.0}, "0 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            Machine(**arguments)


@settings(deadline=None)
@given(ranks=st.sampled_from([1, 2, 5, 8, 64, 16384]), size=st.integers(0, 1 << 34))
def test_a_prediction_takes_the_best_protocol(ranks, size):
    for found in predict("all_reduce", ranks, size, HGX_H200):
        algorithm = ALGORITHMS["all_reduce"][found.algorithm]
        times = [
            algorithm.cost(ranks, size, machine).seconds(machine)
            for machine in map(HGX_H200.machine, HGX_H200.protocols)
        ]
        assert found.seconds == min(times)
