"""all_reduce: every operation and type with each instruction set, long sums, what is refused, special values."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo, name_of
from collective_cases import MOVED, REDUCED, Case, operations, run
from fault_list import plays
from on_ranks import on_ranks
from oracle import FLOATS, OPS, allows, assert_alike, assert_same, bits, reduce_op, reduced, sample

from fastcoll._load import C

SHAPES = [(1,), (7,), (3, 5), (1000,), (65537,)]


def ways(op):
    """Returns the ways to make a call, as attributes of a case."""
    if IS_GLOO:
        return [{}]
    named = [] if op == "PREMUL_SUM" else ["operator"]
    return [{}, {"async_op": True}, *({"door": door} for door in ["direct", "plan", *named])]


ISAS = ["avx2", "baseline"] if torch.cpu._is_avx2_supported() else ["baseline"]
"""Instruction sets of the reductions beside the machine's best, which all other tests run."""


def each_isa() -> Iterator[str]:
    """Yields the name of each instruction set while it is in use.

    The making of a group chooses the instruction set of the process, which lives on.
    """
    best = C.reduce_isa()
    yield best
    for isa in [] if IS_GLOO else ISAS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTCOLL_ISA", isa)
            dist.new_group()
        assert C.reduce_isa() == isa
        yield isa
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCOLL_ISA", best)
        dist.new_group()


def all_reduce_given(tensors, op="SUM"):
    tensor = tensors[dist.get_rank()].clone()
    dist.all_reduce(tensor, op=reduce_op(op))
    return tensor


@pytest.mark.parametrize("dtype", REDUCED, ids=name_of)
@on_ranks(3, fresh=True)
def test_operations_and_instruction_sets(dtype):
    """The results are right, and the same on all ranks and with each instruction set."""
    found = set()
    for _ in each_isa():
        outputs = [
            run(Case("all_reduce", op, dtype, shape, seed=seed, **ways(op)[seed % len(ways(op))]))
            for op in operations("all_reduce", dtype)
            for seed, shape in enumerate(SHAPES)
        ]
        assert_alike(outputs)
        found.add(b"".join(outputs))
    assert len(found) == 1


@beyond_gloo("sums in another order")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(7)
def test_sum_is_in_rank_order_and_rounded_once(dtype):
    inputs = [sample(r, (200_003,), dtype) for r in range(dist.get_world_size())]
    assert_same(all_reduce_given(inputs), reduced(inputs, "SUM"))


@beyond_gloo("computes something for these, or crashes")
@pytest.mark.parametrize("dtype", MOVED, ids=name_of)
@on_ranks(2, fresh=True)
def test_meaningless_operations_are_refused(dtype):
    for op in (op for op in OPS if not allows(op, dtype)):
        tensor = sample(dist.get_rank(), (5,), dtype)
        before = tensor.clone()
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            dist.all_reduce(tensor, op=reduce_op(op))
        assert_same(tensor, before)
        after = torch.ones(3)
        dist.all_reduce(after)  # the ranks are still in step
        assert_same(after, torch.full((3,), float(dist.get_world_size())))


@plays(51)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=name_of)
@on_ranks(2)
def test_integers_wrap_around(dtype):
    top = torch.iinfo(dtype).max
    given = [torch.tensor([top, 1, top], dtype=dtype), torch.tensor([1, top, top], dtype=dtype)]
    for _ in each_isa():
        assert_same(all_reduce_given(given), given[0] + given[1])
        assert_same(all_reduce_given(given, "PRODUCT"), given[0] * given[1])


def assert_same_beside_nan(actual, expected):
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


@plays(49)
@beyond_gloo("drops NaN unless rank 0 has it")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
@on_ranks(3)
def test_nan_wins(op, dtype):
    """NaN of any rank, at the places where vector code and its tail meet."""
    given = [sample(r, (67,), dtype) for r in range(3)]
    for place in range(67):
        given[place % 3][place] = float("nan") if place % 5 else 0.0
    expected = reduced(given, op)
    assert expected.isnan().sum() == 53
    for _ in each_isa():
        tensor = all_reduce_given(given, op)
        assert_same_beside_nan(tensor, expected)
        assert_alike(bits(tensor))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(2)
def test_infinities_and_signs(dtype):
    inf, nan = float("inf"), float("nan")
    given = [
        torch.tensor([inf, inf, -inf, nan, 0.0, -0.0, 1.0], dtype=dtype),
        torch.tensor([1.0, -inf, -inf, 1.0, -0.0, -0.0, inf], dtype=dtype),
    ]
    for _ in each_isa():
        assert_same_beside_nan(all_reduce_given(given), given[0] + given[1])


@plays(50)
@on_ranks(2)
def test_denormals_are_kept():
    given = [torch.tensor([1e-40, -3e-42, 1e-45]), torch.tensor([2e-40, 1e-42, 1e-45])]
    for _ in each_isa():
        assert_same(all_reduce_given(given), given[0] + given[1])


@beyond_gloo("has no PREMUL_SUM")
@on_ranks(3)
def test_premultiplied_by_a_tensor():
    tensor = torch.full((9,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(torch.tensor([0.5])))
    assert_same(tensor, torch.full((9,), 3.0))
