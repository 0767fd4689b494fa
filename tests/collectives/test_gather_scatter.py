"""gather and scatter: every root, every element type."""

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo, name_of, since
from oracle import COMPLEX, assert_same, moved_types, sample

SHAPES = [(1,), (3, 5), (0,), (4097,), ()]


def gather_to(root, dtype, shapes):
    for seed, shape in enumerate(shapes):
        inputs = [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]
        given = inputs[dist.get_rank()].clone()
        outputs = [torch.empty_like(t) for t in inputs] if dist.get_rank() == root else None
        dist.gather(given, outputs, dst=root)
        assert_same(given, inputs[dist.get_rank()])
        for output, expected in zip(outputs or [], inputs, strict=False):
            assert_same(output, expected)


def gather_single_to(root, dtype, shapes):
    for seed, shape in enumerate(shapes):
        size, is_root = dist.get_world_size(), dist.get_rank() == root
        inputs = [sample(r, shape, dtype, seed) for r in range(size)]
        given = inputs[dist.get_rank()].clone()
        output = torch.empty((size, *shape), dtype=dtype) if is_root else None
        for async_op in (False, True):
            work = dist.gather_single(given, output, root, async_op=async_op)
            assert (work is not None and work.wait()) is async_op
            assert_same(given, inputs[dist.get_rank()])
            if is_root:
                assert_same(output, torch.stack(inputs))
                output.zero_()


def gather_single_of_wrong_size():
    output = torch.empty(7) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        expected = "expected an output of 3 x 2 elements on the root, got 7"
        with pytest.raises(ValueError, match=expected):
            dist.gather_single(torch.ones(2), output)
        output = torch.empty(6)
    dist.gather_single(torch.full((2,), float(dist.get_rank())), output)
    if output is not None:
        assert_same(output, torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]))


def scatter_from(root, dtype, shapes):
    for seed, shape in enumerate(shapes):
        inputs = [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]
        output = torch.empty_like(inputs[0])
        dist.scatter(output, inputs if dist.get_rank() == root else None, src=root)
        assert_same(output, inputs[dist.get_rank()])


def both_in_group(members, root):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    mine = members.index(dist.get_rank())
    inputs = [sample(r, (6,), torch.float) for r in range(len(members))]
    output = torch.empty(6)
    is_root = dist.get_rank() == root
    dist.scatter(output, inputs if is_root else None, src=root, group=group)
    assert_same(output, inputs[mine])
    back = [torch.empty(6) for _ in members] if is_root else None
    dist.gather(output, back, dst=root, group=group)
    for got, expected in zip(back or [], inputs, strict=False):
        assert_same(got, expected)


def asynchronously(root):
    inputs = [sample(r, (50,), torch.float) for r in range(dist.get_world_size())]
    output, is_root = torch.empty(50), dist.get_rank() == root
    dist.scatter(output, inputs if is_root else None, src=root, async_op=True).wait()
    assert_same(output, inputs[dist.get_rank()])
    back = [torch.empty(50) for _ in inputs] if is_root else None
    dist.gather(output, back, dst=root, async_op=True).wait()
    for got, expected in zip(back or [], inputs, strict=False):
        assert_same(got, expected)


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_gather_type(world, dtype):
    if IS_GLOO and dtype in COMPLEX:
        pytest.skip("beyond gloo: complex gather")
    world(3).run(gather_to, 2, dtype, SHAPES)


@since(14, "gather_single")
@beyond_gloo("it has no gather_single")
@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_gather_single_type(world, dtype):
    world(3).run(gather_single_to, 2, dtype, SHAPES)


@since(14, "gather_single")
@beyond_gloo("it has no gather_single")
def test_gather_single_of_wrong_size(world):
    world(3).run(gather_single_of_wrong_size)


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_scatter_type(world, dtype):
    world(3).run(scatter_from, 2, dtype, SHAPES)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_every_root(world, size):
    for root in range(size):
        world(size).run(gather_to, root, torch.float, SHAPES)
        world(size).run(scatter_from, root, torch.float, SHAPES)


def test_large(world):
    world(2).run(gather_to, 0, torch.float, [(4 * 2**20 + 1,)])
    world(2).run(scatter_from, 1, torch.float, [(4 * 2**20 + 1,)])


def test_root_is_a_global_rank(world):
    world(4).run(both_in_group, [1, 2, 3], 2)


def test_asynchronous(world):
    world(3).run(asynchronously, 1)
