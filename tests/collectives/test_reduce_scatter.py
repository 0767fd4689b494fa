"""reduce_scatter from a list and from one tensor."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of, reduce_scatter_single
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
SHAPES = [(1,), (3, 5), (1000,), (65537,)]


def inputs_of_all(shape, dtype, seed):
    """Return [rank][destination] tensors."""
    size = dist.get_world_size()
    return [[sample(r * size + d, shape, dtype, seed) for d in range(size)] for r in range(size)]


def from_list(op, dtype, shapes):
    mine = dist.get_rank()
    for seed, shape in enumerate(shapes):
        inputs = inputs_of_all(shape, dtype, seed)
        output = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(output, inputs[mine], op=reduce_op(op))
        assert_reduced(output, [row[mine] for row in inputs], op)
        for given, before in zip(
            inputs[mine], inputs_of_all(shape, dtype, seed)[mine], strict=True
        ):
            assert torch.equal(given, before), "the input was changed"


def from_tensor(op, dtype, form, shapes):
    mine = dist.get_rank()
    for seed, shape in enumerate(shapes):
        inputs = inputs_of_all(shape, dtype, seed)
        output = torch.empty(shape, dtype=dtype)
        given = (torch.cat if form == "concat" else torch.stack)(inputs[mine])
        before = given.clone()
        work = reduce_scatter_single(output, given, op=reduce_op(op), async_op=seed % 2 == 1)
        if work is not None:
            work.wait()
        assert_reduced(output, [row[mine] for row in inputs], op)
        assert torch.equal(given, before), "the input was changed"


def from_unequal_sizes(sizes):
    mine = dist.get_rank()
    inputs = [
        [sample(10 * r + d, shape, torch.float) for d, shape in enumerate(sizes)]
        for r in range(dist.get_world_size())
    ]
    output = torch.empty(sizes[mine])
    dist.reduce_scatter(output, inputs[mine])
    assert_reduced(output, [row[mine] for row in inputs], "SUM")


def into_its_own_part():
    """The output may be the rank's own part of the input."""
    inputs = inputs_of_all((9,), torch.float, 0)
    mine = dist.get_rank()
    given = torch.cat(inputs[mine])
    output = given[9 * mine : 9 * mine + 9]
    reduce_scatter_single(output, given)
    assert_reduced(output, [row[mine] for row in inputs], "SUM")


def wrong_size():
    size = dist.get_world_size()
    with pytest.raises((ValueError, RuntimeError)):
        reduce_scatter_single(torch.empty(3), torch.ones(3 * size + 1))
    with pytest.raises((ValueError, RuntimeError)):
        dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * (size + 1))
    dist.barrier()


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=name_of)
def test_operation_and_type(world, op, dtype):
    world(3).run(from_tensor, op, dtype, "concat", SHAPES)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_list(world, size, op):
    world(size).run(from_list, op, torch.float, [*SHAPES, ()])


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_tensor(world, size):
    world(size).run(from_tensor, "SUM", torch.float, "concat", [*SHAPES, (0,)])


@beyond_gloo("refuses the stacked form")
def test_tensor_stacked(world):
    world(3).run(from_tensor, "SUM", torch.float, "stack", [*SHAPES, ()])


@beyond_gloo("refuses unequal sizes")
@pytest.mark.parametrize("sizes", [[(3,), (5,), (1,)], [(2, 2), (0,), (70001,)]], ids=str)
def test_list_of_unequal_sizes(world, sizes):
    world(3).run(from_unequal_sizes, sizes)


def test_large(world):
    world(2).run(from_tensor, "SUM", torch.float, "concat", [(2 * 2**20 + 1,)])


def test_output_inside_the_input(world):
    world(3).run(into_its_own_part)


def test_wrong_sizes_are_refused_before_anything_is_sent(world):
    world(2).run(wrong_size)


def into_an_input(shape, step):
    """The output is one of the inputs, also another than the rank's own."""
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = inputs_of_all(shape, torch.float, step)
    given = list(torch.stack(inputs[mine]).unbind())
    dist.reduce_scatter(given[(mine + step) % size], given)
    assert_reduced(given[(mine + step) % size], [inputs[r][mine] for r in range(size)], "SUM")


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5,), (300_000,)])
def test_the_output_may_be_one_of_the_inputs(world, shape, step):
    world(3).run(into_an_input, shape, step)
