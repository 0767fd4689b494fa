"""all_reduce of sparse COO tensors, whose indices differ from rank to rank."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from on_ranks import on_ranks
from oracle import assert_alike


def sparse(rank, entries, dtype, dense_dims, coalesced):
    """Return a sparse 20 x 4 tensor with repeated indices unless coalesced."""
    random = torch.Generator().manual_seed(rank)
    if dense_dims:
        indices = torch.randint(0, 20, (1, entries), generator=random)
        values = torch.randint(-50, 50, (entries, 4), generator=random).to(dtype)
    else:
        rows = torch.randint(0, 20, (1, entries), generator=random)
        indices = torch.cat([rows, torch.randint(0, 4, (1, entries), generator=random)])
        values = torch.randint(-50, 50, (entries,), generator=random).to(dtype)
    tensor = torch.sparse_coo_tensor(indices, values, (20, 4))
    return tensor.coalesce() if coalesced else tensor


def all_reduce(entries, dtype, dense_dims=True, coalesced=False, async_op=False):
    inputs = [sparse(r, n, dtype, dense_dims, coalesced) for r, n in enumerate(entries)]
    expected = sum(t.to_dense() for t in inputs)
    tensor = inputs[dist.get_rank()].clone()
    work = dist.all_reduce(tensor, async_op=async_op)
    if async_op:
        work.wait()
    assert tensor.is_sparse and tensor.shape == (20, 4)
    assert torch.equal(tensor.to_dense(), expected)
    assert_alike(tensor.coalesce().indices().tolist())


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "repeated"])
@pytest.mark.parametrize("dense_dims", [True, False], ids=["rows", "elements"])
@pytest.mark.parametrize("entries", [(3, 5, 9), (0, 4, 0), (0, 0, 0)], ids=str)
@on_ranks(3)
def test_sum(entries, dense_dims, coalesced, async_op):
    all_reduce(entries, torch.float, dense_dims, coalesced, async_op)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, torch.double), (2, torch.int64), *((n, torch.float) for n in (1, 2, 4))],
    ids=name_of,
)
@on_ranks()
def test_world_size_and_type(dtype):
    all_reduce((3, 5, 1, 2)[: dist.get_world_size()], dtype)


@beyond_gloo("ignores the operation")
@on_ranks(2)
def test_only_sums_are_taken():
    tensor = sparse(dist.get_rank(), 3, torch.float, True, True)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.barrier()
