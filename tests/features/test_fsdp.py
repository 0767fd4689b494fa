"""Fully sharded data parallelism, both generations, against one process."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from training import assert_like, loss_of, network, parameters_of, sgd, train, train_alone
from world import on_ranks

STEPS = 4


def first_generation(strategy, dtype, tolerance):
    model = FullyShardedDataParallel(
        network(dtype),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        sharding_strategy=getattr(ShardingStrategy, strategy),
    )
    losses = train(model, STEPS)
    with FullyShardedDataParallel.summon_full_params(model):
        alone = train_alone(STEPS, dist.get_world_size(), model=network(dtype))
        assert_like(model, alone, tolerance)
    return losses


def sharded(model, mesh, **options):
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def full_parameters(model):
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def second_generation(dtype, tolerance, mesh_shape=None, mixed=False, reshard=True):
    size = dist.get_world_size()
    if mesh_shape is None:
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float)
    model = sharded(network(dtype), mesh, mp_policy=policy, reshard_after_forward=reshard)
    losses = train(model, STEPS)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    expected = parameters_of(train_alone(STEPS, size, model=network(dtype)))
    torch.testing.assert_close(full_parameters(model), expected, rtol=tolerance, atol=tolerance)
    assert (expected - parameters_of(network(dtype))).abs().max() > 3 * tolerance
    return losses


@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_generation(world, size):
    world(size).run(first_generation, "FULL_SHARD", torch.double, 1e-10)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_first_generation_strategies(world, strategy):
    world(2).run(first_generation, strategy, torch.float, 1e-5)


@on_ranks(2)
def test_first_generation_mixed():
    bf16 = torch.bfloat16
    model = FullyShardedDataParallel(
        network(torch.float),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
    )
    train(model, STEPS)
    with FullyShardedDataParallel.summon_full_params(model):
        alone = train_alone(STEPS, dist.get_world_size(), model=network(torch.float))
        assert_like(model, alone, 2e-2)


@on_ranks(3)
def test_first_generation_clips_by_the_norm_of_all():
    model = FullyShardedDataParallel(network(torch.float), device_id=torch.device("cpu"))
    loss_of(model, dist.get_rank(), 0, torch.float).backward()
    norm = model.clip_grad_norm_(0.1)
    alone, size = network(torch.float), dist.get_world_size()
    for rank in range(size):
        (loss_of(alone, rank, 0, torch.float) / size).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.double, torch.float], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_second_generation(world, size, dtype):
    tolerance = 1e-10 if dtype == torch.double else 1e-5
    world(size).run(second_generation, dtype, tolerance, fresh=True)


def test_second_generation_without_resharding(world):
    world(2).run(second_generation, torch.float, 1e-5, None, False, False, fresh=True)


def test_second_generation_hybrid(world):
    world(4).run(second_generation, torch.float, 1e-5, (2, 2), fresh=True)


def test_second_generation_mixed(world):
    world(2).run(second_generation, torch.float, 2e-2, None, True, fresh=True)


@on_ranks(2, fresh=True)
def test_second_generation_reduces_in_bfloat16():
    """Gradients that are reduced in bfloat16."""
    size = dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = sharded(network(torch.float), init_device_mesh("cpu", (size,)), mp_policy=policy)
    train(model, STEPS)
    expected = parameters_of(train_alone(STEPS, size, model=network(torch.float)))
    torch.testing.assert_close(full_parameters(model), expected, rtol=2e-2, atol=2e-2)


@beyond_gloo("has no PREMUL_SUM")
@on_ranks(3, fresh=True)
def test_second_generation_divide_factor():
    """A divide factor of one's own goes to the backend as PREMUL_SUM."""
    size = dist.get_world_size()
    model = sharded(network(torch.float), init_device_mesh("cpu", (size,)))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.5)
    loss_of(model, dist.get_rank(), 0, torch.float).backward()
    alone = network(torch.float)
    for rank in range(size):
        (loss_of(alone, rank, 0, torch.float) / 1.5).backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)


@on_ranks(2, fresh=True)
def test_second_generation_accumulates():
    size = dist.get_world_size()
    model = sharded(network(), init_device_mesh("cpu", (size,)))
    optimizer = sgd(model.parameters())
    model.set_requires_gradient_sync(False)
    loss_of(model, dist.get_rank(), 0).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, dist.get_rank(), 1).backward()
    optimizer.step()
    alone = network()
    for step in (0, 1):
        for rank in range(size):
            (loss_of(alone, rank, step) / size).backward()
    sgd(alone.parameters()).step()
    torch.testing.assert_close(full_parameters(model), parameters_of(alone), rtol=1e-10, atol=1e-10)
