"""The same bits on every rank, from run to run, and however a message is cut."""

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, beyond_gloo, name_of, reduce_scatter_single
from on_ranks import on_ranks
from oracle import FLOATS, assert_alike, assert_same, bits, reduced, sample

ELEMENTS = 200_003
CUTS = [1, 2, 4, 8, 19, 61, 1023, 4099, 65535, 65536, 100_000, 150_001]


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(4)
def test_same_bits_on_all_ranks_and_in_all_runs(dtype, op):
    tensors = [sample(dist.get_rank(), (ELEMENTS,), dtype) for _ in range(2)]
    for tensor in tensors:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    assert_same(*tensors)
    assert_alike(bits(tensors[0]))


@beyond_gloo("its ring sums in another order for another size")
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(4)
def test_pieces_give_the_bits_of_the_whole(dtype, op):
    operation = getattr(dist.ReduceOp, op)
    whole = sample(dist.get_rank(), (ELEMENTS,), dtype)
    pieces = [piece.clone() for piece in torch.tensor_split(whole, CUTS)]
    dist.all_reduce(whole, op=operation)
    works = [dist.all_reduce(piece, op=operation, async_op=True) for piece in pieces]
    for work in works:
        work.wait()
    assert_same(torch.cat(pieces), whole)


@beyond_gloo("its algorithms sum in different orders")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(4)
def test_every_reducing_collective_gives_the_same_bits(dtype):
    """all_reduce, reduce, reduce_scatter and all of them in a list give the same bits."""
    mine, size = dist.get_rank(), dist.get_world_size()
    given = sample(mine, (size * 1001,), dtype)
    expected = given.clone()
    dist.all_reduce(expected)

    tensor = given.clone()
    dist.reduce(tensor, 1)
    if mine == 1:
        assert_same(tensor, expected)

    part = torch.empty(1001, dtype=dtype)
    reduce_scatter_single(part, given)
    again = torch.empty_like(given)
    all_gather_single(again, part)
    assert_same(again, expected)

    pieces = [piece.clone() for piece in torch.tensor_split(given, [1, 18, 2000])]
    with dist._coalescing_manager():
        for piece in pieces:
            dist.all_reduce(piece)
    assert_same(torch.cat(pieces), expected)


@beyond_gloo("sums in another order")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@on_ranks(7)
def test_sum_is_in_rank_order_and_rounded_once(dtype):
    inputs = [sample(r, (ELEMENTS,), dtype) for r in range(dist.get_world_size())]
    tensor = inputs[dist.get_rank()].clone()
    dist.all_reduce(tensor)
    assert_same(tensor, reduced(inputs, "SUM"))


@beyond_gloo("rounds every sum")
@pytest.mark.parametrize(
    ("dtype", "first", "total"),
    [(torch.bfloat16, 256.0, 260.0), (torch.half, 2048.0, 2052.0)],
    ids=name_of,
)
@on_ranks(5)
def test_low_precision_is_summed_in_float(dtype, first, total):
    """256 + 1 + 1 + 1 + 1: in bfloat16 every single sum is 256 again."""
    tensor = torch.full((1000,), 1.0 if dist.get_rank() else first, dtype=dtype)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((1000,), total, dtype=dtype))
