"""Several tensors in one collective: the coalescing manager and the ..._coalesced calls."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import Case, Runner
from on_ranks import on_ranks
from oracle import assert_reduced, assert_same, sample

SHAPES = [(3, 5), (1,), (4097,), (64,), (0,)]


def of_all(seed, shape, dtype=torch.float):
    return [sample(r, shape, dtype, seed) for r in range(dist.get_world_size())]


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("size", "collective", "op"),
    [
        *((size, "all_reduce", op) for size in (1, 3) for op in ("SUM", "AVG", "MAX")),
        *((3, "reduce_scatter_single", op) for op in ("SUM", "AVG")),
        (3, "all_gather_single", "SUM"),
    ],
)
@on_ranks()
def test_with_manager(collective, op, async_ops):
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        runners = [Runner(Case(collective, op, shape=s, seed=n)) for n, s in enumerate(SHAPES)]
    if async_ops:
        manager.wait()
    for runner in runners:
        runner.check()


@beyond_gloo("has no startCoalescing")
@on_ranks(3)
def test_any_collectives_with_device():
    """With a device the manager hands every call to the backend between start and end."""
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        runners = [
            Runner(Case("all_gather", shape=(7,))),
            Runner(Case("broadcast", shape=(7,), root=1)),
            Runner(Case("reduce", shape=(100,))),
        ]
    manager.wait()
    for runner in runners:
        runner.check()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch: deprecated
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float, torch.int32, torch.complex64], ids=str)
@on_ranks(3)
def test_coalesced_calls(dtype, async_op):
    inputs = [of_all(seed, shape, dtype) for seed, shape in enumerate(SHAPES)]
    outputs = [[torch.empty_like(row[0]) for row in inputs] for _ in range(dist.get_world_size())]
    tensors = [row[dist.get_rank()].clone() for row in inputs]
    future = dist.all_gather_coalesced(outputs, tensors, async_op=async_op)
    if async_op:
        future.wait()
    for source, output in enumerate(outputs):
        for tensor, row in zip(output, inputs, strict=True):
            assert_same(tensor, row[source])
    future = dist.all_reduce_coalesced(tensors, async_op=async_op)
    if async_op:
        for tensor, value in zip(tensors, future.wait(), strict=True):
            assert_same(value, torch.view_as_real(tensor) if dtype.is_complex else tensor)
    for tensor, row in zip(tensors, inputs, strict=True):
        assert_reduced(tensor, row, "SUM")


@beyond_gloo("has no list of several dtypes")
@on_ranks(3)
def test_a_list_of_several_dtypes():
    import fastcoll

    dtypes = [torch.float, torch.int64, torch.float, torch.bfloat16, torch.int64]
    inputs = [of_all(seed, (5 + seed,), dtype) for seed, dtype in enumerate(dtypes)]
    tensors = [row[dist.get_rank()].clone() for row in inputs]
    fastcoll.all_reduce_coalesced(tensors)
    for tensor, row in zip(tensors, inputs, strict=True):
        assert_reduced(tensor, row, "SUM")
