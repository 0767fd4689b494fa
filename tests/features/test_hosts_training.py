"""Training over two pretended hosts of two ranks each, against one process."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks
from test_fsdp import mesh_of, second_generation
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, network, sharded, train, train_alone
from ways import WAYS
from world import here, init_group

import fastcoll.fsdp

pytestmark = beyond_gloo("fastcoll's own hosts")

STEPS, HOSTS, EACH = 4, 2, 2


def on_two_hosts(function):
    """Make a test of a function that each of four ranks on two hosts runs."""

    @functools.wraps(function)
    def call(*arguments):
        os.environ["FASTCOLL_HOST_ID"] = f"host {here().rank // EACH}"
        init_group()
        dist.barrier()
        assert backend_of().transport() == "shm+gloo"
        function(*arguments)

    return on_ranks(HOSTS * EACH, init=False, fresh=True)(call)


def hybrid_shards():
    """HSDP: shards inside a host, replicas between hosts; return what each goes over."""
    second_generation(torch.float, 1e-5, (HOSTS, EACH))
    groups = [mesh_of(HOSTS, EACH).get_group(name) for name in ("shard", "replicate")]
    for group in groups:
        dist.barrier(group=group)
    return [backend_of(group).transport() for group in groups]


@on_two_hosts
def test_shards_inside_and_replicas_between_hosts():
    assert hybrid_shards() == ["shm", "gloo"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wire, tolerance", [(None, 1e-5), (torch.bfloat16, 2e-2)])
@on_two_hosts
def test_gradients(way, wire, tolerance):
    model = network(torch.float)
    options = {"gradient_as_bucket_view": True} if way == "hook" else {"gradient_norm": True}
    train(WAYS[way](model, wire_dtype=wire, **options)[0], STEPS)
    assert_replicated(model)
    assert_like(model, train_alone(STEPS, HOSTS * EACH, model=network(torch.float)), tolerance)


@on_two_hosts
def test_fused_shards():
    model = sharded(network(torch.float), mesh=mesh_of())
    fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16)
    train(model, STEPS)
    assert_like(model, train_alone(STEPS, HOSTS * EACH, model=network(torch.float)), 2e-2)


@on_two_hosts
def test_sharded_optimizer():
    """ZeroRedundancyOptimizer, and a rank without inputs for the last step."""
    model = DistributedDataParallel(network())
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    train(model, STEPS, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))
    assert_like(model.module, train_alone(STEPS, HOSTS * EACH, adam))
    assert_replicated(model.module)
    with model.join():
        for _ in range(1 + here().rank % 2):
            model(torch.ones(3, 12, dtype=torch.double)).sum().backward()
