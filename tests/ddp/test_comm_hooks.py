"""The communication hooks that ship with torch."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, loss_of, network, train, train_alone

STEPS = 5


def sum_by_future(group, bucket):
    """A hook of one's own that works inside the callback."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].div_(dist.get_world_size(group)))


def gather_and_average(group, bucket):
    """A hook that moves bytes and averages by itself."""
    size = dist.get_world_size(group)
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    future = dist.all_gather(parts, bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda _: torch.stack(parts).mean(0))


def bf16_compress(group, bucket):
    # torch refuses bf16_compress_hook itself for all backends but NCCL, by its name
    return default_hooks.bf16_compress_hook(group, bucket)


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, 1e-10),
    "sum_by_future": (sum_by_future, 1e-10),
    "gather_and_average": (gather_and_average, 1e-10),
    "fp16_compress": (default_hooks.fp16_compress_hook, 5e-3),
    "bf16_compress": (bf16_compress, 1e-2),
}


@pytest.mark.parametrize("many_buckets", [False, True], ids=["one_bucket", "many_buckets"])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(3)
def test_hook(name, many_buckets):
    hook, tolerance = HOOKS[name]
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001 if many_buckets else 25)
    model.register_comm_hook(None, hook)
    losses = train(model, STEPS)
    assert_like(model.module, train_alone(STEPS, dist.get_world_size()), tolerance)
    assert_replicated(model.module)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("approximation_rank", [1, 20])
@on_ranks(2)
def test_power_sgd(approximation_rank):
    """At full rank PowerSGD loses nothing; below it all ranks must still agree."""
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=approximation_rank,
        start_powerSGD_iter=2,
        min_compression_rate=1e-6,
        use_error_feedback=True,
        warm_start=True,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(model, STEPS)
    assert state.iter == STEPS and state.total_numel_after_compression > 0
    if approximation_rank > 1:
        assert_like(model.module, train_alone(STEPS, dist.get_world_size()), 1e-7)
    assert_replicated(model.module)
    assert losses[-1] < losses[0]


@on_ranks(4, fresh=True)
def test_post_local_sgd():
    """After start_localSGD_iter only the ranks of a subgroup average; an averager does the rest."""
    size = dist.get_world_size()
    subgroups = [dist.new_group([2 * n, 2 * n + 1]) for n in range(size // 2)]
    model = DistributedDataParallel(network())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=subgroups[dist.get_rank() // 2], start_localSGD_iter=2
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    # With an average after every step of plain SGD, local SGD is SGD.
    expected = train_alone(STEPS, size, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_like(model.module, expected)
    assert_replicated(model.module)
