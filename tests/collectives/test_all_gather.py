"""all_gather into a list and into one tensor."""

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, all_gather_single, beyond_gloo, name_of
from oracle import assert_same, moved_types, sample

SHAPES = [(1,), (7,), (3, 5), (0,), (4097,)]


def inputs_of_all(shape, dtype, seed=0):
    return [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]


def gather_into_list(dtype, shapes):
    for seed, shape in enumerate(shapes):
        inputs = inputs_of_all(shape, dtype, seed)
        outputs = [torch.empty_like(t) for t in inputs]
        given = inputs[dist.get_rank()].clone()
        dist.all_gather(outputs, given)
        for output, expected in zip(outputs, inputs, strict=True):
            assert_same(output, expected)
        assert_same(given, inputs[dist.get_rank()])


def gather_into_tensor(dtype, form, shapes):
    for seed, shape in enumerate(shapes):
        inputs = inputs_of_all(shape, dtype, seed)
        raw = [t.view(torch.uint8) if dtype.itemsize == 1 else t for t in inputs]
        expected = (torch.cat if form == "concat" else torch.stack)(raw).view(dtype)
        output = torch.empty_like(expected)
        all_gather_single(output, inputs[dist.get_rank()])
        assert_same(output, expected)


def gather_flat(dtype):
    """Any shape with the right number of elements is an output."""
    inputs = inputs_of_all((2, 6), dtype)
    output = torch.empty(dist.get_world_size() * 12, dtype=dtype)
    all_gather_single(output, inputs[dist.get_rank()])
    assert_same(output, torch.cat(inputs).reshape(-1))


def gather_in_place():
    """The input may be the rank's own part of the output."""
    inputs = inputs_of_all((9,), torch.float)
    output = torch.zeros(dist.get_world_size(), 9)
    output[dist.get_rank()] = inputs[dist.get_rank()]
    all_gather_single(output.view(-1), output[dist.get_rank()])
    assert_same(output, torch.stack(inputs))


def gather_wrong_size():
    given = torch.ones(4)
    with pytest.raises((ValueError, RuntimeError)):
        all_gather_single(torch.empty(4 * dist.get_world_size() + 1), given)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size() + 1)], given)
    uneven = [
        torch.empty(4 if rank == dist.get_rank() else 3) for rank in range(dist.get_world_size())
    ]
    with pytest.raises((ValueError, RuntimeError), match="" if IS_GLOO else "Pad the tensors"):
        dist.all_gather(uneven, given)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        all_gather_single(torch.empty(4 * dist.get_world_size(), dtype=torch.double), given)
    dist.barrier()


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_list_type(world, dtype):
    world(3).run(gather_into_list, dtype, SHAPES)


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_tensor_type(world, dtype):
    world(3).run(gather_into_tensor, dtype, "concat", SHAPES)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_world_size(world, size):
    world(size).run(gather_into_list, torch.float, [*SHAPES, ()])
    world(size).run(gather_into_tensor, torch.float, "concat", SHAPES)


@beyond_gloo("refuses the stacked form")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensor_stacked(world, size):
    world(size).run(gather_into_tensor, torch.float, "stack", [*SHAPES, ()])


@beyond_gloo("refuses other shapes")
def test_tensor_flat(world):
    world(3).run(gather_flat, torch.float)


def test_large(world):
    world(2).run(gather_into_list, torch.float, [(4 * 2**20 + 1,)])
    world(2).run(gather_into_tensor, torch.float, "concat", [(4 * 2**20 + 1,)])


def test_input_inside_the_output(world):
    world(3).run(gather_in_place)


def from_an_output(length, step):
    """The input is one of the outputs, also another than the rank's own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = list(torch.zeros(size, length).unbind())
    own = outputs[(rank + step) % size].fill_(rank)
    dist.all_gather(outputs, own)
    assert [output.unique().tolist() for output in outputs] == [[float(of)] for of in range(size)]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("length", [5, 300_000])
def test_the_input_may_be_one_of_the_outputs(world, length, step):
    world(3).run(from_an_output, length, step)


def test_wrong_sizes_are_refused_before_anything_is_sent(world):
    world(2).run(gather_wrong_size)
