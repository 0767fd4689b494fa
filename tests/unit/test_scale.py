"""The closed forms of what an all-reduce costs at scale, held to what is sent when the algorithm is played."""

import pytest
import scale

ALPHA, BETA, GAMMA = 1000.0, 1.0, 0.5
NODE = scale.Machine(
    scale.Link(ALPHA, BETA), scale.Link(ALPHA, BETA), per_node=1 << 20, per_reduced_byte=GAMMA
)


def seconds(steps: int, sent: float, reduced: float) -> float:
    return steps * ALPHA + sent * BETA + reduced * GAMMA


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_that_is_played(ranks: int) -> None:
    size = 64.0 * ranks
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # whose parts each chunk has
    steps = reduced = 0
    for step in range(2 * (ranks - 1)):
        reduces = step < ranks - 1
        before = [[set(parts) for parts in chunks] for chunks in held]
        for rank in range(ranks):
            chunk = (rank - step + (0 if reduces else 1)) % ranks
            if not reduces:
                chunk = (rank + 1 - (step - (ranks - 1))) % ranks
            given = before[rank][chunk]
            taken = held[(rank + 1) % ranks][chunk]
            assert not (reduces and given & taken)  # nothing is added twice
            held[(rank + 1) % ranks][chunk] = given | taken if reduces else set(given)
        steps, reduced = steps + 1, reduced + reduces
    everybody = set(range(ranks))
    assert all(parts == everybody for chunks in held for parts in chunks)
    chunk = size / ranks
    assert scale.ring(ranks, size, NODE) == pytest.approx(
        seconds(steps, steps * chunk, reduced * chunk)
    )


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_shots_that_are_counted(ranks: int) -> None:
    size = 120.0
    reads = [
        (reader, owner) for reader in range(ranks) for owner in range(ranks) if owner != reader
    ]
    mine = len(reads) / ranks  # reads of a rank in a step
    assert scale.one_shot(ranks, size, NODE) == pytest.approx(seconds(1, mine * size, mine * size))
    share = size / ranks
    assert scale.two_shot(ranks, size, NODE) == pytest.approx(
        seconds(2, 2 * mine * share, mine * share)
    )


def test_a_tree_of_four_in_one_segment_has_two_levels_up_and_two_down() -> None:
    size = 1.0  # so small that one segment is best; the busiest rank has two children of half a message
    assert scale.double_tree(4, size, NODE) == pytest.approx(seconds(4, 4 * size, 2 * size))
    large = 1e9
    # In the limit of many segments: each byte up once and down once.
    assert scale.double_tree(4, large, NODE) == pytest.approx(large * (2 * BETA + GAMMA), rel=0.01)


def test_nodes_send_each_other_a_share() -> None:
    machine = scale.Machine(
        scale.Link(1.0, 1e-3), scale.Link(ALPHA, BETA), per_node=4, per_reduced_byte=0.0
    )
    size = 4096.0
    between = scale.ring(8, size / 4, scale.Machine(machine.inter, machine.inter, 1, 0.0))
    inside = scale.two_shot(4, size, machine)
    assert scale.hierarchical(scale.ring, 32, size, machine) == pytest.approx(inside + between)
    flat = scale.ring(32, size, machine)
    assert flat == pytest.approx(62 * (ALPHA + size / 32 / 4 * BETA))


def test_what_there_is_for_one_node_and_for_many() -> None:
    assert set(scale.predictions(8, 1 << 20, scale.HGX_H200)) == {
        "ring",
        "double_tree",
        "one_shot",
        "two_shot",
    }
    many = scale.predictions(1024, 1 << 20, scale.HGX_H200)
    assert set(many) == {"ring", "double_tree", "hierarchical, ring", "hierarchical, double_tree"}
    assert scale.predictions(2, 4, [scale.CPU])["one_shot"] == pytest.approx(1.0, rel=0.01)
