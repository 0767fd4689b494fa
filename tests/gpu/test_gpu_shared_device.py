"""Ranks that share a GPU without NCCL, which refuses them: all-reduces over the memory that they map of each other.

The GPU gives each process a slice of time in turn: few and small calls. Every rank has a deadline, after which its
process is ended.
"""

import pytest
import torch
import torch.distributed as dist
from test_gpu_peers import (
    DEVICE,
    calls_are_the_oracle,
    forced_group,
    in_a_graph_of_the_users,
    lists_are_planned,
    oracle,
    reduces_of,
    values,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_are_the_oracle_without_nccl(gpu_shared_world, size, algorithm):
    gpu_shared_world(size).run(calls_are_the_oracle, algorithm)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_lists_are_planned_without_nccl(gpu_shared_world, algorithm):
    gpu_shared_world(2).run(lists_are_planned, algorithm)


def test_in_a_graph_of_the_users_without_nccl(gpu_shared_world):
    gpu_shared_world(2).run(in_a_graph_of_the_users, "two_shot")


def unforced(count, algorithm):
    """A message of a size for which NCCL may be chosen elsewhere, and others that only NCCL could serve."""
    group = forced_group("auto")
    topology = reduces_of(group).region.topology
    assert (topology.peers, topology.library) == (True, False), topology.reason
    inputs = values(count, torch.float32, 1)
    x = inputs[dist.get_rank()].to(DEVICE)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    assert torch.equal(x.cpu(), oracle(inputs, "avg", 1.0, None, algorithm))
    assert reduces_of(group).chosen == algorithm
    with pytest.raises(ValueError, match="ranks share a device, which NCCL refuses"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64, device=DEVICE), group=group)
    with pytest.raises(ValueError, match="NCCL refuses them"):
        dist.broadcast(x, 0, group=group)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("count", "algorithm"), [(5000, "two_shot"), (2_500_000, "two_shot")])
def test_what_nccl_would_do(gpu_shared_world, count, algorithm):
    gpu_shared_world(2).run(unforced, count, algorithm)
