"""reduce: to every rank; only the destination's tensor is promised."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from oracle import (
    COMPLEX,
    FLOATS,
    GLOO_REDUCES,
    INTEGERS,
    OPS,
    allows,
    assert_reduced,
    reduce_op,
    sample,
)

CASES = [
    pytest.param(
        op,
        dtype,
        marks=[]
        if dtype in GLOO_REDUCES and op != "PREMUL_SUM"
        else beyond_gloo("unknown operation or type"),
    )
    for dtype in [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
    for op in OPS
    if allows(op, dtype)
]


def reduce_to(root, op, dtype):
    for seed, shape in enumerate([(1,), (3, 5), (4097,), (0,), ()]):
        inputs = [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]
        tensor = inputs[dist.get_rank()].clone()
        dist.reduce(tensor, root, op=reduce_op(op))
        if dist.get_rank() == root:
            assert_reduced(tensor, inputs, op)


def reduce_in_group(members, root):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    tensor = sample(dist.get_rank(), (33,), torch.float)
    dist.reduce(tensor, root, group=group)
    if dist.get_rank() == root:
        assert_reduced(tensor, [sample(r, (33,), torch.float) for r in members], "SUM")


def reduce_large(elements):
    inputs = [sample(r, (elements,), torch.float) for r in range(dist.get_world_size())]
    tensor = inputs[dist.get_rank()].clone()
    dist.reduce(tensor, 1, async_op=True).wait()
    if dist.get_rank() == 1:
        assert_reduced(tensor, inputs, "SUM")


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=name_of)
def test_operation_and_type(world, op, dtype):
    world(3).run(reduce_to, 2, op, dtype)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_every_root(world, size):
    for root in range(size):
        world(size).run(reduce_to, root, "SUM", torch.double)


def test_large(world):
    world(2).run(reduce_large, 8 * 2**20)


def test_root_is_a_global_rank(world):
    world(4).run(reduce_in_group, [0, 2, 3], 2)
