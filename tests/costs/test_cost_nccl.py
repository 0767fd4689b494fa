"""NCCL's own model: values worked out by hand from its rules, and what must hold of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll.costs import nccl

pytestmark = pytest.mark.full


def found(collective, ranks, size):
    return {
        p.algorithm: (p.protocol, p.seconds * 1e6) for p in nccl.predict(collective, ranks, size)
    }


@pytest.mark.parametrize(
    ("collective", "ranks", "size", "algorithm", "protocol", "microseconds"),
    [
        # 6.6 + 14 * 0.6
        ("all_reduce", 8, 0, "ring", "LL", 15.0),
        # 6.8 + 2 * 7 * 0.6
        ("all_reduce", 8, 0, "tree", "LL", 15.2),
        # 8.4 + 14 * 3.4, and 2**30 bytes at 360 * 8 / 14 GB/s
        ("all_reduce", 8, 1 << 30, "ring", "Simple", 56.0 + 2**30 / (360e3 * 8 / 14)),
        # 8.4 + 2 * (7 * 4 + 3 * 14); 8 channels of 36 GB/s, halved
        ("all_reduce", 64, 1 << 30, "tree", "Simple", 148.4 + 2**30 / (8 * 36e3 / 2)),
        # 6.6 + 112 * max(0.6, 1) + 14 * 2.7
        ("all_reduce", 64, 0, "ring", "LL", 6.6 + 112 + 14 * 2.7),
        # 6.8 + 2 * (7 * 0.6 + 3 * 5)
        ("all_reduce", 64, 0, "tree", "LL", 6.8 + 2 * (4.2 + 15)),
        # 1.4 * (8.4 + 112 * 3.4 + 14 * 14); 8 channels of 48 GB/s
        ("all_reduce", 64, 1 << 33, "ring", "Simple",
         1.4 * (8.4 + 112 * 3.4 + 196) + 2**33 / (384e3 * 64 / 126)),
        # 8.4 + 7 * 3.4; 360 * 8 / 7
        ("all_gather", 8, 1 << 30, "ring", "Simple", 8.4 + 23.8 + 2**30 / (360e3 * 8 / 7)),
        # 8 channels: 9 times 40 fits the 370.8 of a GPU's links; 0.85 and 7/8 of it, twice, is below 60
        ("all_reduce", 8, 1 << 30, "nvls", "Simple", 25 + 2**30 / (8 * 59.5e3 * 8 / 14)),
        # 4 channels of 60, the fastest speed there is
        ("all_reduce", 4, 1 << 30, "nvls", "Simple", 25 + 2**30 / (4 * 60e3 * 4 / 6)),
        ("all_gather", 8, 1 << 30, "nvls", "Simple", 25 + 2**30 / (8 * 40e3 * 0.85 * (7 / 8) ** 2)),
        # 8 channels of at most 45.5 between 8 nodes, up and down a tree of 3 levels
        ("all_reduce", 64, 1 << 30, "nvls", "Simple", 25 + 6 * 20.9 + 2**30 / (8 * 45.5e3 * 64 / 126)),
    ],
)  # fmt: skip
def test_by_hand(collective, ranks, size, algorithm, protocol, microseconds):
    which, time = found(collective, ranks, size)[algorithm]
    assert which == protocol
    assert time == pytest.approx(microseconds, rel=1e-12)


@given(
    collective=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    ranks=st.sampled_from([2, 4, 8, 16, 64, 1024, 16384]),
    size=st.integers(0, 1 << 34),
)
def test_a_ring_is_slower_with_more_bytes(collective, ranks, size):
    # Not so the tree, whose correction jumps from one power of two to the next.
    larger = found(collective, ranks, 2 * size + 1)["ring"][1]
    assert found(collective, ranks, size)["ring"][1] < larger


def test_a_tree_takes_over_from_the_ring_with_more_nodes():
    assert (
        found("all_reduce", 1024, 1 << 20)["tree"][1]
        < found("all_reduce", 1024, 1 << 20)["ring"][1]
    )
    assert found("all_reduce", 8, 1 << 30)["ring"][1] < found("all_reduce", 8, 1 << 30)["tree"][1]


def test_one_gpu_per_node():
    # 6.6 + 14 * 5, the tree's latency, and 6.8 + 2 * 3 * 5; one card of 50 GB/s
    ring, tree = nccl.predict("all_reduce", 8, 0, per_node=1)  # no switch: no NVLS
    assert (ring.seconds * 1e6, tree.seconds * 1e6) == pytest.approx((76.6, 36.8))
    ring, _ = nccl.predict("all_reduce", 8, 1 << 33, per_node=1)
    assert ring.protocol == "Simple"
    assert ring.seconds * 1e6 == pytest.approx(
        1.4 * (8.4 + 14 * 14) + 2**33 / (48e3 * 8 / 14), rel=1e-12
    )


def test_the_next_generation_is_faster() -> None:
    for size in (1 << 20, 1 << 24, 1 << 30):
        for ranks in (2, 4, 8):
            older, newer = (
                min(p.seconds for p in nccl.predict("all_reduce", ranks, size, generation=each))
                for each in (nccl.HOPPER, nccl.BLACKWELL)
            )
            assert older / 2.01 < newer < older


@pytest.mark.parametrize(
    "arguments",
    [("broadcast", 8, 8), ("all_reduce", 1, 8), ("all_reduce", 12, 8), ("all_reduce", 8, 8, 0)],
)
def test_other_questions_have_no_model(arguments):
    with pytest.raises(ValueError, match=r"costs\.nccl"):
        nccl.predict(*arguments)
