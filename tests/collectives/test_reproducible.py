"""The same bits on every rank, from run to run, and however a message is cut."""

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, beyond_gloo, name_of, reduce_scatter_single
from oracle import FLOATS, assert_same, bits, reduced, sample

ELEMENTS = 200_003
CUTS = [1, 2, 4, 8, 19, 61, 1023, 4099, 65535, 65536, 100_000, 150_001]


def all_reduce(dtype, op):
    tensor = sample(dist.get_rank(), (ELEMENTS,), dtype)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return bits(tensor)


def all_reduce_in_pieces(dtype, op):
    operation = getattr(dist.ReduceOp, op)
    whole = sample(dist.get_rank(), (ELEMENTS,), dtype)
    pieces = [piece.clone() for piece in torch.tensor_split(whole, CUTS)]
    dist.all_reduce(whole, op=operation)
    works = [dist.all_reduce(piece, op=operation, async_op=True) for piece in pieces]
    for work in works:
        work.wait()
    assert_same(torch.cat(pieces), whole)


def ways_to_reduce(dtype):
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


def sum_in_rank_order(dtype):
    inputs = [sample(r, (ELEMENTS,), dtype) for r in range(dist.get_world_size())]
    tensor = inputs[dist.get_rank()].clone()
    dist.all_reduce(tensor)
    assert_same(tensor, reduced(inputs, "SUM"))


def count_up(dtype, first, others):
    """Ones that are lost if each sum is rounded to the type."""
    value = first if dist.get_rank() == 0 else others
    tensor = torch.full((1000,), value, dtype=dtype)
    dist.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_same_bits_on_all_ranks_and_in_all_runs(world, dtype, op):
    first = world(4).run(all_reduce, dtype, op)
    assert len(set(first)) == 1
    assert world(4).run(all_reduce, dtype, op) == first


@beyond_gloo("its ring sums in another order for another size")
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_pieces_give_the_bits_of_the_whole(world, dtype, op):
    world(4).run(all_reduce_in_pieces, dtype, op)


@beyond_gloo("its algorithms sum in different orders")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_every_reducing_collective_gives_the_same_bits(world, dtype):
    world(4).run(ways_to_reduce, dtype)


@beyond_gloo("sums in another order")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sum_is_in_rank_order_and_rounded_once(world, dtype):
    world(7).run(sum_in_rank_order, dtype)


@beyond_gloo("rounds every sum")
@pytest.mark.parametrize(
    ("dtype", "first", "total"),
    [(torch.bfloat16, 256.0, 260.0), (torch.half, 2048.0, 2052.0)],
    ids=name_of,
)
def test_low_precision_is_summed_in_float(world, dtype, first, total):
    """256 + 1 + 1 + 1 + 1: in bfloat16 every single sum is 256 again."""
    for tensor in world(5).run(count_up, dtype, first, 1.0):
        assert_same(tensor, torch.full((1000,), total, dtype=dtype))
