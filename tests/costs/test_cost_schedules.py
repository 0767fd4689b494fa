"""The formulas against their schedules, executed on integers: right results, and the same steps, bytes and time."""

from dataclasses import replace
from fractions import Fraction

import pytest
from cost_cases import EVERY, exact_machine, placed

from fastcoll.costs import (
    ALGORITHMS,
    Schedule,
    Transfer,
    broadcast,
    double_tree,
    execute,
    pipelined,
)
from fastcoll.costs.double_tree import height, parents

pytestmark = pytest.mark.full

SIZE = Fraction(997)  # a prime: no number of ranks divides it
RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24, 32, 40, 64]


def assert_same(counted, formula, machine):
    assert counted.steps == formula.steps
    assert counted.wire_bytes == formula.wire_bytes
    assert counted.inter_bytes == formula.inter_bytes
    assert counted.seconds(machine) == formula.seconds(machine)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_formula_is_what_the_schedule_does(collective, algorithm):
    compared = 0
    for per_node in (1, 2, 3, 4, 8, 64):
        machine = exact_machine(per_node)
        for ranks in RANKS:
            # The tree knows no nodes: its own test has it.
            mixed = algorithm.name == "tree" and 1 < per_node < ranks
            # Those in parts have their own too, and here one part.
            in_parts = algorithm.name.startswith("pipelined") and ranks > 24
            if (
                not placed(ranks, per_node)
                or mixed
                or in_parts
                or algorithm.unsupported(ranks, machine)
            ):
                continue
            plan = algorithm.schedule(collective, ranks, machine)
            counted = execute(plan, collective, SIZE, machine)
            if algorithm.name.endswith("tree"):
                # One segment is what the schedule has; the formula would take the best number.
                machine_of_trees = replace(
                    machine, inter=replace(machine.inter, latency=Fraction(10**6))
                )
                if algorithm.name == "tree":
                    assert_same(counted, double_tree.all_reduce(ranks, SIZE, machine, 1), machine)
                else:
                    formula = algorithm.cost(ranks, SIZE, machine_of_trees)
                    assert_same(counted, formula, machine)
            elif algorithm.name == "chain":
                assert_same(counted, broadcast.chain(ranks, SIZE, machine, 1), machine)
            elif algorithm.name.startswith("pipelined"):
                flat = ALGORITHMS[collective][algorithm.name.removeprefix("pipelined_")]
                assert_same(counted, in_parts_of(flat, ranks, machine, 1), machine)
            else:
                assert_same(counted, algorithm.cost(ranks, SIZE, machine), machine)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
@pytest.mark.parametrize("per_node", [1, 64])
def test_tree_with_segments(segments, per_node):
    machine = exact_machine(per_node)
    for ranks in range(1, 65):
        plan = double_tree.schedule("all_reduce", ranks, machine, segments)
        counted = execute(plan, "all_reduce", SIZE, machine)
        assert_same(counted, double_tree.all_reduce(ranks, SIZE, machine, segments), machine)


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
@pytest.mark.parametrize("per_node", [1, 4, 64])
def test_chain_with_segments(segments, per_node):
    machine = exact_machine(per_node)
    for ranks in (ranks for ranks in range(1, 33) if placed(ranks, per_node)):
        plan = broadcast.chain_schedule("broadcast", ranks, machine, segments)
        counted = execute(plan, "broadcast", SIZE, machine)
        assert_same(counted, broadcast.chain(ranks, SIZE, machine, segments), machine)


def in_parts_of(flat, ranks, machine, parts):
    return pipelined.in_parts(flat.cost, ranks, SIZE, machine, parts)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
def test_pipeline_of_parts(name, parts):
    flat = ALGORITHMS["all_reduce"][name]
    for per_node, nodes in ((2, 2), (2, 5), (3, 2), (4, 4), (8, 3)):
        machine, ranks = exact_machine(per_node), per_node * nodes
        plan = pipelined.schedule_with(flat.schedule, parts)("all_reduce", ranks, machine)
        counted = execute(plan, "all_reduce", SIZE, machine)
        assert_same(counted, in_parts_of(flat, ranks, machine, parts), machine)


def test_one_part_is_hierarchical():
    machine = exact_machine(per_node=4)
    flat, whole = (ALGORITHMS["all_reduce"][name] for name in ("ring", "hierarchical_ring"))
    assert in_parts_of(flat, 16, machine, 1).seconds(machine) == whole.cost(
        16, SIZE, machine
    ).seconds(machine)


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_tree_on_nodes_is_not_faster_than_its_schedule(ranks):
    machine = exact_machine(per_node=4)
    plan = double_tree.schedule("all_reduce", ranks, machine, 3)
    counted = execute(plan, "all_reduce", SIZE, machine)
    formula = double_tree.all_reduce(ranks, SIZE, machine, 3)
    assert counted.steps == formula.steps
    assert counted.wire_bytes == formula.wire_bytes
    assert counted.inter_bytes <= formula.inter_bytes
    assert counted.seconds(machine) <= formula.seconds(machine)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 100, 511, 512, 1000])
def test_both_trees_span_all_ranks_and_share_no_inner_one(ranks):
    inner = []
    for tree in parents(ranks):
        (root,) = set(range(ranks)) - tree.keys()
        children = [[child for child in tree if tree[child] == rank] for rank in range(ranks)]
        assert max(map(len, children)) <= 2
        depths = []
        for rank in range(ranks):
            depth = 0
            while rank != root:
                rank, depth = tree[rank], depth + 1
            depths.append(depth)
        assert max(depths) == height(ranks)
        inner.append({rank for rank in range(ranks) if children[rank]})
    # A root has one child, and may have children in the other tree too.
    shared = inner[0] & inner[1]
    assert len(shared) <= 1
    assert ranks % 2 or not shared


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ([], "rank 0 has a wrong sum"),
        ([Transfer(1, 0, (0,), True)], "rank 1 has a wrong sum"),
        ([Transfer(1, 0, (0,), True), Transfer(1, 0, (0,), True)], "rank 0 has a wrong sum"),
        ([Transfer(1, 0, (0,), False), Transfer(0, 1, (0,), False)], "rank 0 has a wrong sum"),
    ],
    ids=["nothing", "half", "twice", "swapped"],
)
def test_a_wrong_schedule_is_found(steps, match):
    plan = Schedule(2, 1)
    plan.phase([steps])
    with pytest.raises(ValueError, match=match):
        execute(plan, "all_reduce", 8, exact_machine())


def test_another_collective_is_refused():
    with pytest.raises(ValueError, match="got 'all_to_all'"):
        execute(Schedule(1, 1), "all_to_all", 8, exact_machine())


def test_every_collective_has_algorithms():
    assert set(ALGORITHMS) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    for collective, algorithms in ALGORITHMS.items():
        if collective == "broadcast":
            continue
        assert "ring" in algorithms and any(name.startswith("hierarchical") for name in algorithms)
