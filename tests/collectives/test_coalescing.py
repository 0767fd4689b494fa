"""Several tensors in one collective: the coalescing manager and the ..._coalesced calls."""

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, beyond_gloo, reduce_scatter_single
from oracle import assert_reduced, assert_same, sample

SHAPES = [(3, 5), (1,), (4097,), (64,), (0,)]

ignore_deprecation = pytest.mark.filterwarnings("ignore::FutureWarning")


def of_all(seed, shape, dtype=torch.float):
    return [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]


def all_reduce_with_manager(async_ops, op):
    inputs = [of_all(seed, shape) for seed, shape in enumerate(SHAPES)]
    tensors = [row[dist.get_rank()].clone() for row in inputs]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    if async_ops:
        manager.wait()
    for tensor, row in zip(tensors, inputs, strict=True):
        assert_reduced(tensor, row, op)


def all_gather_with_manager(async_ops):
    size = dist.get_world_size()
    inputs = [of_all(seed, shape) for seed, shape in enumerate(SHAPES)]
    outputs = [torch.empty(size * shape[0], *shape[1:]) for shape in SHAPES]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for output, row in zip(outputs, inputs, strict=True):
            all_gather_single(output, row[dist.get_rank()])
    if async_ops:
        manager.wait()
    for output, row in zip(outputs, inputs, strict=True):
        assert_same(output, torch.cat(row))


def reduce_scatter_with_manager(async_ops, op):
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = [of_all(seed, (size * shape[0], *shape[1:])) for seed, shape in enumerate(SHAPES)]
    outputs = [torch.empty(shape) for shape in SHAPES]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for output, row in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, row[mine], op=getattr(dist.ReduceOp, op))
    if async_ops:
        manager.wait()
    for output, row, shape in zip(outputs, inputs, SHAPES, strict=True):
        part = slice(mine * shape[0], (mine + 1) * shape[0])
        assert_reduced(output, [t[part] for t in row], op)


def any_collectives_with_device():
    """With a device the manager hands every call to the backend between start and end."""
    mine, size = dist.get_rank(), dist.get_world_size()
    summed, copied = of_all(0, (100,)), of_all(1, (7,))
    tensor, other = summed[mine].clone(), copied[mine].clone()
    gathered = [torch.empty(7) for _ in range(size)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_gather(gathered, copied[mine])
        dist.broadcast(other, 1)
        dist.reduce(tensor, 0)
    manager.wait()
    assert_same(torch.stack(gathered), torch.stack(copied))
    assert_same(other, copied[1])
    if mine == 0:
        assert_reduced(tensor, summed, "SUM")


def all_reduce_coalesced(dtype, async_op):
    inputs = [of_all(seed, shape, dtype) for seed, shape in enumerate(SHAPES)]
    tensors = [row[dist.get_rank()].clone() for row in inputs]
    future = dist.all_reduce_coalesced(tensors, async_op=async_op)
    if async_op:
        for tensor, value in zip(tensors, future.wait(), strict=True):
            assert_same(value, torch.view_as_real(tensor) if dtype.is_complex else tensor)
    for tensor, row in zip(tensors, inputs, strict=True):
        assert_reduced(tensor, row, "SUM")


def all_gather_coalesced(dtype, async_op):
    inputs = [of_all(seed, shape, dtype) for seed, shape in enumerate(SHAPES)]
    outputs = [[torch.empty_like(row[0]) for row in inputs] for _ in range(dist.get_world_size())]
    mine = [row[dist.get_rank()] for row in inputs]
    future = dist.all_gather_coalesced(outputs, mine, async_op=async_op)
    if async_op:
        future.wait()
    for source, output in enumerate(outputs):
        for tensor, row in zip(output, inputs, strict=True):
            assert_same(tensor, row[source])


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce_with_manager(world, size, op, async_ops):
    world(size).run(all_reduce_with_manager, async_ops, op)


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
def test_all_gather_with_manager(world, async_ops):
    world(3).run(all_gather_with_manager, async_ops)


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_reduce_scatter_with_manager(world, op, async_ops):
    world(3).run(reduce_scatter_with_manager, async_ops, op)


@beyond_gloo("has no startCoalescing")
def test_any_collectives_with_device(world):
    world(3).run(any_collectives_with_device)


@ignore_deprecation
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float, torch.int32, torch.complex64], ids=str)
def test_all_reduce_coalesced(world, dtype, async_op):
    world(3).run(all_reduce_coalesced, dtype, async_op)


@ignore_deprecation
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float, torch.int32, torch.complex64], ids=str)
def test_all_gather_coalesced(world, dtype, async_op):
    world(3).run(all_gather_coalesced, dtype, async_op)


def dtypes_in_turns():
    import fastcoll

    dtypes = [torch.float, torch.int64, torch.float, torch.bfloat16, torch.int64]
    inputs = [of_all(seed, (5 + seed,), dtype) for seed, dtype in enumerate(dtypes)]
    tensors = [row[dist.get_rank()].clone() for row in inputs]
    fastcoll.all_reduce_coalesced(tensors)
    for tensor, row in zip(tensors, inputs, strict=True):
        assert_reduced(tensor, row, "SUM")


@beyond_gloo("has no list of several dtypes")
def test_a_list_of_several_dtypes(world):
    world(3).run(dtypes_in_turns)
