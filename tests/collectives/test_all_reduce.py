"""all_reduce: every operation, every element type, every world size."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from collective_cases import MOVED, REDUCED, Case, operations, run
from fault_list import plays
from on_ranks import on_ranks
from oracle import FLOATS, OPS, allows, assert_alike, assert_same, bits, reduce_op, reduced, sample
from world import Worlds

from fastcoll._load import C

SHAPES = [(1,), (7,), (3, 5), (1000,), (65537,)]
ALLOWED = [(op, dtype) for dtype in REDUCED for op in operations("all_reduce", dtype)]
REFUSED = [(op, dtype) for dtype in MOVED for op in OPS if not allows(op, dtype)]

ISAS = ["avx2", "baseline"] if torch.cpu._is_avx2_supported() else ["baseline"]
"""Instruction sets of the reductions beside the machine's best, which all other tests run."""


def isa_in_use():
    return C.reduce_isa()


@pytest.fixture(
    scope="module",
    params=[
        "best",
        *(
            pytest.param(isa, marks=[pytest.mark.full, beyond_gloo("chooses by itself")])
            for isa in ISAS
        ),
    ],
)
def world(request: pytest.FixtureRequest, world: Worlds, tmp_path_factory):
    """Every case of this file with each instruction set."""
    if request.param == "best":
        yield world
        return
    isa = {"FASTCOLL_ISA": request.param}
    with contextlib.closing(Worlds(tmp_path_factory.mktemp("isa"), environ=isa)) as worlds:
        assert worlds(1).run(isa_in_use) == [request.param]
        yield worlds


def all_reduce(shapes, op, dtype):
    """The results are right, and the same on all ranks."""
    found = [
        run(Case("all_reduce", op, dtype, shape, seed=seed, async_op=seed % 2 == 1))
        for seed, shape in enumerate(shapes)
    ]
    assert_alike(found)


def all_reduce_given(tensors, op="SUM"):
    tensor = tensors[dist.get_rank()].clone()
    dist.all_reduce(tensor, op=reduce_op(op))
    return tensor


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=name_of)
@on_ranks(3)
def test_operation_and_type(op, dtype):
    all_reduce(SHAPES, op, dtype)


def take(isa):
    os.environ["FASTCOLL_ISA"] = isa
    dist.new_group()
    assert C.reduce_isa() == isa


@beyond_gloo("chooses by itself")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("world", ["best"], indirect=True)
@on_ranks(3, fresh=True)
def test_operations_and_types_with_another_instruction_set(isa):
    """The making of a group chooses the instruction set of the process, which lives on."""
    best = C.reduce_isa()
    take(isa)
    try:
        for op, dtype in ALLOWED:
            all_reduce([(67,)], op, dtype)
    finally:
        take(best)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@on_ranks(1, 2, 4, 5)
def test_world_size(op):
    all_reduce([*SHAPES, (0,), (), (2, 0, 3)], op, torch.float)


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [(torch.float, 8 * 2**20), (torch.bfloat16, 2 * 2**20), (torch.int64, 4 * 2**20)],
    ids=name_of,
)
@on_ranks(2)
def test_large(dtype, elements):
    all_reduce([(elements,), (elements - 1,)], "SUM", dtype)


@beyond_gloo("computes something for these, or crashes")
@pytest.mark.parametrize(("op", "dtype"), REFUSED, ids=name_of)
@on_ranks(2, fresh=True)
def test_meaningless_operation_is_refused(op, dtype):
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
    assert_same(all_reduce_given(given), given[0] + given[1])
    assert_same(all_reduce_given(given, "PRODUCT"), given[0] * given[1])


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
    tensor = all_reduce_given(given, op)
    assert torch.equal(tensor.isnan(), expected.isnan())
    assert torch.equal(tensor.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert_alike(bits(tensor))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(2)
def test_infinities_and_signs(dtype):
    inf, nan = float("inf"), float("nan")
    given = [
        torch.tensor([inf, inf, -inf, nan, 0.0, -0.0, 1.0], dtype=dtype),
        torch.tensor([1.0, -inf, -inf, 1.0, -0.0, -0.0, inf], dtype=dtype),
    ]
    expected = given[0] + given[1]
    tensor = all_reduce_given(given)
    assert torch.equal(tensor.isnan(), expected.isnan())
    assert torch.equal(tensor.nan_to_num(7.0), expected.nan_to_num(7.0))


@plays(50)
@on_ranks(2)
def test_denormals_are_kept():
    given = [torch.tensor([1e-40, -3e-42, 1e-45]), torch.tensor([2e-40, 1e-42, 1e-45])]
    assert_same(all_reduce_given(given), given[0] + given[1])


@beyond_gloo("has no PREMUL_SUM")
@on_ranks(3)
def test_premultiplied_by_a_tensor():
    tensor = torch.full((9,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(torch.tensor([0.5])))
    assert_same(tensor, torch.full((9,), 3.0))
