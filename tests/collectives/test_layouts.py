"""Collectives on tensors that are not contiguous, not aligned, empty, scalar or under autograd."""

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, beyond_gloo, reduce_scatter_single
from fault_list import plays
from layouts import DENSE, FLAT, LAYOUTS, gaps_untouched, laid_out
from oracle import assert_reduced, assert_same, sample

SHAPE = (5, 7)


def layouts(*, known):
    """Parameters for all layouts, of which gloo handles the known ones."""
    beyond = beyond_gloo("an error, or wrong numbers without one")
    return [pytest.param(name, marks=[] if name in known else beyond) for name in LAYOUTS]


def samples(shape=SHAPE, dtype=torch.float, seed=0):
    return [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]


def empties(layout, count):
    return [laid_out(torch.zeros(SHAPE), layout) for _ in range(count)]


def all_reduce(layout, dtype):
    for shape in [SHAPE, (64, 129), (1, 1), (3, 4, 5)]:
        inputs = samples(shape, dtype)
        tensor = laid_out(inputs[dist.get_rank()], layout)
        dist.all_reduce(tensor)
        assert_reduced(tensor, inputs, "SUM")
        assert layout == "contiguous" or gaps_untouched(tensor)


def every_collective(layout):
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = samples()

    tensor = laid_out(inputs[mine], layout)
    dist.broadcast(tensor, 1)
    assert_same(tensor, inputs[1])
    assert layout == "contiguous" or gaps_untouched(tensor)

    tensor = laid_out(inputs[mine], layout)
    dist.reduce(tensor, 0)
    if mine == 0:
        assert_reduced(tensor, inputs, "SUM")

    outputs = empties(layout, size)
    dist.all_gather(outputs, laid_out(inputs[mine], layout))
    for output, expected in zip(outputs, inputs, strict=True):
        assert_same(output, expected)
        assert layout == "contiguous" or gaps_untouched(output)

    outputs = empties(layout, size)
    dist.gather(laid_out(inputs[mine], layout), outputs if mine == 1 else None, dst=1)
    if mine == 1:
        for output, expected in zip(outputs, inputs, strict=True):
            assert_same(output, expected)

    (output,) = empties(layout, 1)
    parts = [laid_out(t, layout) for t in inputs]
    dist.scatter(output, parts if mine == 0 else None, src=0)
    assert_same(output, inputs[mine])

    (output,) = empties(layout, 1)
    dist.reduce_scatter(
        output, [laid_out(sample(mine + d, SHAPE, torch.float), layout) for d in range(size)]
    )
    assert_reduced(output, [sample(r + mine, SHAPE, torch.float) for r in range(size)], "SUM")

    outputs = empties(layout, size)
    dist.all_to_all(
        outputs, [laid_out(sample(10 * mine + d, SHAPE, torch.float), layout) for d in range(size)]
    )
    for source, output in enumerate(outputs):
        assert_same(output, sample(10 * source + mine, SHAPE, torch.float))


def single_tensor_collectives(layout):
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = samples()
    output = laid_out(torch.zeros(5 * size, 7), layout)
    all_gather_single(output, laid_out(inputs[mine], layout))
    assert_same(output, torch.cat(inputs))

    wide = samples((5 * size, 7))
    (output,) = empties(layout, 1)
    reduce_scatter_single(output, laid_out(wide[mine], layout))
    assert_reduced(output, [t[5 * mine : 5 * mine + 5] for t in wide], "SUM")

    output = laid_out(torch.zeros(5 * size, 7), layout)
    dist.all_to_all_single(output, laid_out(wide[mine], layout))
    assert_same(output, torch.cat([t[5 * mine : 5 * mine + 5] for t in wide]))


def point_to_point(layout):
    mine, size = dist.get_rank(), dist.get_world_size()
    (output,) = empties(layout, 1)
    sending = dist.isend(laid_out(samples()[mine], layout), (mine + 1) % size)
    dist.recv(output, (mine - 1) % size)
    sending.wait()
    assert_same(output, samples()[(mine - 1) % size])
    assert layout == "contiguous" or gaps_untouched(output)


def expanded_inputs():
    mine, size = dist.get_rank(), dist.get_world_size()
    given = torch.tensor([float(mine + 1)]).expand(6)
    outputs = [torch.empty(6) for _ in range(size)]
    dist.all_gather(outputs, given)
    for source, output in enumerate(outputs):
        assert_same(output, torch.full((6,), source + 1.0))
    output = torch.empty(6)
    reduce_scatter_single(output, torch.tensor([mine + 1.0]).expand(size * 6))
    assert_same(output, torch.full((6,), size * (size + 1) / 2))


def overlapping_outputs():
    """Refused where they would be written; nothing has been sent by then."""
    mine, size = dist.get_rank(), dist.get_world_size()
    overlapping = [torch.ones(1).expand(6), torch.ones(8).as_strided((4, 3), (1, 1))]
    for tensor in overlapping:
        for call in (
            lambda t=tensor: dist.all_reduce(t),
            lambda t=tensor: dist.broadcast(t, 1 - mine),
            lambda t=tensor: dist.reduce(t, mine),
            lambda t=tensor: dist.recv(t, 1 - mine),
            lambda t=tensor: dist.all_gather([t] * size, torch.ones(t.shape)),
            lambda t=tensor: dist.reduce_scatter(t, [torch.ones(t.shape)] * size),
        ):
            with pytest.raises(ValueError, match="overlap"):
                call()
    dist.barrier()


def leaf_under_autograd():
    parameter = torch.nn.Parameter(torch.full((4,), dist.get_rank() + 1.0))
    dist.all_reduce(parameter)
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None
    assert_same(parameter, torch.full((4,), 3.0))
    dist.broadcast(parameter, 0)
    outputs = [torch.empty(4), torch.empty(4)]
    dist.all_gather(outputs, parameter)
    assert_same(outputs[1], torch.full((4,), 3.0))


def lazily_conjugated():
    """As inputs only: torch hands the backend a resolved copy, so an output could not be written."""
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs = [sample(r, (6,), torch.complex64).conj() for r in range(size)]
    mine = inputs[rank]
    assert mine.is_conj()
    gathered = [torch.empty(6, dtype=torch.complex64) for _ in inputs] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    for output, expected in zip(gathered or (), inputs, strict=rank == 0):
        assert_same(output, expected.resolve_conj())
    negative = mine.imag
    assert negative.is_neg()
    outputs = [torch.empty(6) for _ in inputs]
    dist.all_gather(outputs, negative)
    for output, expected in zip(outputs, inputs, strict=True):
        assert_same(output, expected.imag.resolve_neg().contiguous())


@pytest.mark.parametrize("layout", layouts(known=DENSE))
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.int8], ids=str)
def test_all_reduce(world, layout, dtype):
    world(3).run(all_reduce, layout, dtype)


@plays(52)
@pytest.mark.parametrize("layout", layouts(known=DENSE))
def test_every_collective(world, layout):
    world(3).run(every_collective, layout)


@pytest.mark.parametrize("layout", layouts(known=FLAT))
def test_collectives_of_one_tensor(world, layout):
    world(3).run(single_tensor_collectives, layout)


@pytest.mark.parametrize("layout", layouts(known=FLAT))
def test_point_to_point(world, layout):
    world(3).run(point_to_point, layout)


@beyond_gloo("reads past the end")
def test_expanded_inputs(world):
    world(3).run(expanded_inputs)


@beyond_gloo("crashes, or overwrites silently")
def test_overlapping_output_is_refused(world):
    world(2).run(overlapping_outputs)


@plays(54)
def test_requires_grad(world):
    world(2).run(leaf_under_autograd)


@plays(55)
@beyond_gloo("ignores conjugate and negative bits")
def test_conjugate_and_negative_bits(world):
    world(2).run(lazily_conjugated)
