"""Training over two pretended hosts of two ranks each, against one process."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from test_fsdp import second_generation, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, network, parameters_of, train, train_alone
from world import here, init_group

import fastcoll.ddp
import fastcoll.fsdp

pytestmark = beyond_gloo("fastcoll's own hosts")

STEPS, HOSTS, EACH = 4, 2, 2


def on_two_hosts(function, *arguments):
    os.environ["FASTCOLL_HOST_ID"] = f"host {here().rank // EACH}"
    init_group("-".join(map(str, (function.__name__, *arguments))))
    try:
        dist.barrier()
        assert dist.group.WORLD._get_backend(torch.device("cpu")).transport() == "shm+gloo"
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def hybrid_shards():
    """HSDP: shards inside a host, replicas between hosts."""
    second_generation(torch.float, 1e-5, (HOSTS, EACH))
    mesh = init_device_mesh("cpu", (HOSTS, EACH), mesh_dim_names=("replicate", "shard"))
    cpu, found = torch.device("cpu"), []
    for name in ("shard", "replicate"):
        group = mesh.get_group(name)
        dist.barrier(group=group)
        found.append(group._get_backend(cpu).transport())
    return found


def fused_shards():
    mesh = init_device_mesh("cpu", (HOSTS * EACH,))
    model = sharded(network(torch.float), mesh)
    fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16)
    train(model, STEPS)
    found = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    expected = parameters_of(train_alone(STEPS, HOSTS * EACH, model=network(torch.float)))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def synchronized(wire, tolerance):
    model = network(torch.float)
    fastcoll.ddp.GradientSynchronizer(model, wire_dtype=wire, gradient_norm=True)
    train(model, STEPS)
    assert_replicated(model)
    assert_like(model, train_alone(STEPS, HOSTS * EACH, model=network(torch.float)), tolerance)


def hooked(wire, tolerance):
    model = DistributedDataParallel(network(torch.float), gradient_as_bucket_view=True)
    state = fastcoll.ddp.FusedAllreduceState(wire_dtype=wire)
    model.register_comm_hook(state, fastcoll.ddp.fused_allreduce_hook)
    train(model, STEPS)
    assert_replicated(model.module)
    alone = train_alone(STEPS, HOSTS * EACH, model=network(torch.float))
    assert_like(model.module, alone, tolerance)


def sharded_optimizer():
    """ZeroRedundancyOptimizer, and a rank without inputs for the last step."""
    model = DistributedDataParallel(network())
    before = copy.deepcopy(model.module)
    train(model, STEPS, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))
    assert_replicated(model.module)
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before.parameters(), model.module.parameters(), strict=True)
    )
    with model.join():
        for _ in range(1 + here().rank % 2):
            model(torch.ones(3, 12, dtype=torch.double)).sum().backward()


def test_shards_inside_and_replicas_between_hosts(world):
    for found in world(4).run(on_two_hosts, hybrid_shards, init=False, fresh=True):
        assert found == ["shm", "gloo"]


@pytest.mark.parametrize("function", [synchronized, hooked])
@pytest.mark.parametrize("wire, tolerance", [(None, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients(world, function, wire, tolerance):
    world(4).run(on_two_hosts, function, wire, tolerance, init=False, fresh=True)


@pytest.mark.parametrize("function", [fused_shards, sharded_optimizer])
def test_other_ways_to_train(world, function):
    world(4).run(on_two_hosts, function, init=False, fresh=True)
