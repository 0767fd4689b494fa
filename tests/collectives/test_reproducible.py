"""The order and the rounding of long sums, and of sums in low precision.

The tables of collectives compare with the same oracle, so ranks, runs, collectives and pieces have the same bits.
"""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from on_ranks import on_ranks
from oracle import FLOATS, assert_same, reduced, sample

ELEMENTS = 200_003


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
