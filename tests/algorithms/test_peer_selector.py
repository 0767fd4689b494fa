"""The selector: pure functions of what all ranks know alike."""

import pytest
import torch

from fastcoll import env
from fastcoll.cuda.algorithms import Call, Topology
from fastcoll.cuda.algorithms.launches import bucket_bytes
from fastcoll.cuda.selector import buckets, fuses, select
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

KIB, MIB = 1 << 10, 1 << 20
PEERS = Topology(8, kernels=True, peers=True, bucket_bytes=32 * MIB)
NCCL = Topology(8, kernels=True, reason="ranks are on different hosts")
BARE = Topology(8, reason="no Triton on rank 1")
MEASURED = Thresholds(one_shot_bytes=64 * KIB, two_shot_bytes=2 * MIB)


def call(size, dtype=torch.float32, op="SUM", wire=None, scale=1.0, tensors=1):
    """A call of so many bytes in the tensors' dtype."""
    elements = size // dtype.itemsize // tensors
    return Call(dtype, op, (elements,) * tensors, wire, scale)


@pytest.mark.parametrize(
    ("what", "topology", "name"),
    [
        (call(4), PEERS, "one_shot"),
        (call(64 * KIB), PEERS, "one_shot"),
        (call(64 * KIB + 4), PEERS, "two_shot"),
        (call(2 * MIB), PEERS, "two_shot"),
        (call(2 * MIB + 4), PEERS, "nccl"),
        # The size is that of what travels, and NCCL has no wire of its own.
        (call(128 * KIB, wire=torch.bfloat16), PEERS, "one_shot"),
        (call(64 * MIB, wire=torch.bfloat16), PEERS, "two_shot"),
        (call(4, wire=torch.bfloat16), NCCL, "all_to_all"),
        (call(64 * MIB, torch.bfloat16), NCCL, "nccl"),
        (call(4, torch.int64), PEERS, "nccl"),
        (call(4, op="BOR"), PEERS, "nccl"),
        (call(4, op="PREMUL_SUM"), PEERS, "nccl"),
        (call(4, torch.complex64), PEERS, "nccl"),
        (call(4), BARE, "nccl"),
        (call(4, scale=0.5), NCCL, "nccl"),
        (call(KIB, tensors=16), PEERS, "one_shot"),
        (call(MIB, tensors=16), PEERS, "two_shot"),
        (call(64 * MIB, tensors=16), PEERS, "nccl"),
        (call(KIB, tensors=16), NCCL, "nccl"),
        (call(4, torch.float64), PEERS, "nccl"),
        (call(KIB, torch.float64, tensors=16), PEERS, "nccl"),
        *((call(4, op=op), PEERS, "nccl") for op in ("MIN", "MAX", "PRODUCT")),
    ],
)  # fmt: skip
def test_what_is_chosen(what, topology, name):
    assert select(what, topology, MEASURED).name == name


def test_one_rank_has_no_use_for_peers():
    alone = Topology(1, kernels=True, peers=True, bucket_bytes=MIB)
    assert select(call(4), alone).name == "nccl"
    assert select(call(4), alone, forced="one_shot").name == "one_shot"


def test_kernels_serve_nothing_that_was_not_measured():
    assert DEFAULT.kernel_bytes == 0
    assert [select(call(size), PEERS).name for size in (1, 100, MIB)] == ["nccl"] * 3


def test_a_table_moves_the_limits():
    table = Thresholds(one_shot_bytes=100, two_shot_bytes=200, ring_bytes=400)
    chosen = [select(call(size), PEERS, table).name for size in (100, 104, 200, 204, 400, 404)]
    assert chosen == ["one_shot", "two_shot", "two_shot", "ring", "ring", "nccl"]


@pytest.mark.parametrize(
    ("what", "topology", "forced", "why"),
    [
        (call(4), NCCL, "ring", "ring: the ranks map no memory of each other: ranks are on different hosts"),
        (call(4, torch.int32), PEERS, "two_shot", "the kernels add float32, float16, bfloat16, not int32"),
        (call(8, torch.float64), PEERS, "ring", "the kernels add float32, float16, bfloat16, not float64"),
        (call(4, op="MAX"), PEERS, "one_shot", "the kernels have SUM and AVG, not MAX"),
        (call(8, torch.float64, wire=torch.bfloat16), PEERS, "auto", "no kernel takes float64 over bfloat16"),
        (call(8, wire=torch.float8_e5m2), PEERS, "auto", "no kernel takes float32 over float8_e5m2"),
        (call(4, wire=torch.bfloat16), BARE, "nccl", "all_to_all: the kernels need Triton on all ranks"),
        (call(64 * MIB, tensors=4), PEERS, "two_shot", "a bucket of 67125248 bytes does not fit into the 33554432"),
        (call(8, op="PREMUL_SUM", tensors=2), BARE, "auto", "nccl: the kernels that fuse tensors need Triton"),
        (call(4, op="MAX", wire=torch.float16), NCCL, "auto", "the kernels have SUM, AVG and PREMUL_SUM, not MAX"),
        (call(4), PEERS, "tree", "expected an algorithm of auto, one_shot, two_shot, ring, nccl, all_to_all"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(what, topology, forced, why):
    with pytest.raises(ValueError) as caught:
        select(what, topology, forced=forced)
    assert why in str(caught.value)


def test_a_fixed_order_is_kept_on_any_number_of_ranks_or_refused():
    def chosen(ranks: int) -> str:
        topology = Topology(ranks, kernels=True, peers=True, bucket_bytes=MIB)
        return select(call(4), topology, MEASURED, fixed=True).name

    assert [chosen(ranks) for ranks in (8, 24, 25, 3072)] == [
        *["one_shot"] * 2,
        *["all_to_all"] * 2,
    ]
    with pytest.raises(ValueError, match="all_to_all: it sums in another order on more than 3072"):
        chosen(3073)


def test_nccl_is_a_library_and_no_algorithm():
    assert select(call(4, wire=torch.bfloat16), PEERS, forced="nccl").name == "all_to_all"
    assert select(call(4), PEERS, forced="nccl").name == "nccl"


def test_what_is_fused():
    def fused(topology, *sizes, dtype=torch.float32, forced="auto", wire=None):
        return fuses(Call(dtype, "SUM", sizes, wire), "nccl", topology, DEFAULT, forced)

    assert fused(PEERS, 1, 2, 3, 4) and fused(NCCL, 1, 2, 3, 4)
    assert not fused(PEERS, 1, 2, 3)
    assert not fused(BARE, 1, 2, 3, 4)
    alone = Topology(1, kernels=True)
    assert not fused(alone, 1, 2, 3, 4)
    assert fused(alone, 1, 2, 3, 4, forced="nccl") and not fused(alone, 1, 2, 3, forced="nccl")
    assert not fused(Topology(1), 1, 2, 3, 4, forced="nccl")
    assert not fused(NCCL, 1, 2, 3, 4, dtype=torch.int32)
    assert fused(NCCL, *[256 * KIB] * 4) and not fused(NCCL, *[256 * KIB] * 3, 256 * KIB + 1)
    assert fused(NCCL, MIB, MIB, wire=torch.bfloat16) and fused(alone, 1, 2, wire=torch.bfloat16)
    assert not fused(BARE, 1, 2, wire=torch.bfloat16)
    large = Call(torch.float32, "SUM", (MIB, MIB), torch.bfloat16)
    assert not fuses(large, "ring", PEERS, DEFAULT)  # which copies a list, but no tensor


@pytest.mark.parametrize(
    ("topology", "wire", "mib", "cut"),
    [
        (NCCL, None, [24, 24, 24], [3]),
        (NCCL, torch.bfloat16, [24, 24, 24], [2, 1]),
        (NCCL, torch.bfloat16, [25, 1, 200, 3, 3], [1, 2, 2]),
        (PEERS, torch.bfloat16, [24, 39, 24], [2, 1]),
        (PEERS, torch.bfloat16, [24, 40, 24], [1, 1, 1]),  # 32 MiB, beside their squares
        (PEERS, torch.bfloat16, [25, 25], [1, 1]),
    ],
)
def test_lists_with_a_wire_are_cut_into_buckets(topology, wire, mib, cut):
    sizes = tuple(size * MIB // 4 for size in mib)
    parts = list(buckets(Call(torch.float32, "SUM", sizes, wire), topology))
    assert [len(sizes[part]) for part in parts] == cut
    assert [size for part in parts for size in sizes[part]] == list(sizes)


def test_a_call_says_what_it_is():
    text = str(call(96, wire=torch.bfloat16, scale=0.5, tensors=3))
    assert text == "SUM of 3 tensors of float32[24] over bfloat16, times 0.5"
    assert bucket_bytes((1, 16, 17), 4) == 64 * 4 + 3 * 8


def test_the_variable_is_checked():
    assert env.read({"FASTCOLL_ALGO": "Two_Shot"})["FASTCOLL_ALGO"] == "two_shot"
    with pytest.raises(ValueError, match="FASTCOLL_ALGO=tree"):
        env.read({"FASTCOLL_ALGO": "tree"})
