"""Fully sharded data parallelism, both generations, against one process."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from training import (
    assert_gradients,
    assert_like,
    backward_alone,
    loss_of,
    network,
    sharded,
    train,
    train_alone,
)

STEPS = 4
TOLERANCE = {torch.double: 1e-10, torch.float: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("size", "strategy", "dtype"),
    [
        *((size, "FULL_SHARD", torch.double) for size in (1, 2, 3)),
        *((2, strategy, torch.float) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
    ],
    ids=name_of,
)
@on_ranks()
def test_first_generation(strategy, dtype):
    model = FullyShardedDataParallel(
        network(dtype),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        sharding_strategy=getattr(ShardingStrategy, strategy),
    )
    train(model, STEPS)
    with FullyShardedDataParallel.summon_full_params(model):
        alone = train_alone(STEPS, dist.get_world_size(), model=network(dtype))
        assert_like(model, alone, TOLERANCE[dtype])


@pytest.mark.full
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
        assert_like(model, alone, TOLERANCE[bf16])


@pytest.mark.full
@on_ranks(3)
def test_first_generation_clips_by_the_norm_of_all():
    model = FullyShardedDataParallel(network(torch.float), device_id=torch.device("cpu"))
    loss_of(model, dist.get_rank(), 0).backward()
    norm = model.clip_grad_norm_(0.1)
    alone = backward_alone(network(torch.float), dist.get_world_size())
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)


def mesh_of(*shape):
    """Of all ranks, or of replicas and shards."""
    if not shape:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def second_generation(dtype, tolerance, mesh_shape=(), **options):
    model = sharded(network(dtype), mesh=mesh_of(*mesh_shape), **options)
    train(model, STEPS)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_like(model, train_alone(STEPS, dist.get_world_size(), model=network(dtype)), tolerance)


def mixed(reduced):
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)}


@pytest.mark.parametrize(
    ("size", "dtype", "options"),
    [
        *((size, dtype, {}) for size in (1, 2, 3) for dtype in (torch.double, torch.float)),
        (2, torch.float, {"reshard_after_forward": False}),
        (4, torch.float, {"mesh_shape": (2, 2)}),
        *((2, torch.float, mixed(reduced)) for reduced in (torch.float, torch.bfloat16)),
    ],
    ids=name_of,
)
@on_ranks(fresh=True)
def test_second_generation(dtype, options):
    computed = torch.bfloat16 if "mp_policy" in options else dtype
    second_generation(dtype, TOLERANCE[computed], **options)


@beyond_gloo("has no PREMUL_SUM")
@on_ranks(3, fresh=True)
def test_second_generation_divide_factor():
    """A divide factor of one's own goes to the backend as PREMUL_SUM."""
    model = sharded(network(torch.float), mesh=mesh_of())
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.5)
    loss_of(model, dist.get_rank(), 0).backward()
    assert_gradients(model, backward_alone(network(torch.float), 3), factor=3 / 1.5)
