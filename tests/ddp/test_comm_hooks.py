"""Communication hooks of torch and of a user; PyTorch's own suites have the others (tests/peer/torch_suites)."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, network, train, train_alone

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


def power_sgd():
    """At full rank PowerSGD loses nothing."""
    return powerSGD_hook.PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=20,
        start_powerSGD_iter=2,
        min_compression_rate=1e-6,
    )


HOOKS = {
    "sum_by_future": (sum_by_future, lambda: None, 1e-10),
    "gather_and_average": (gather_and_average, lambda: None, 1e-10),
    "bf16_compress": (bf16_compress, lambda: None, 1e-2),
    "powerSGD": (powerSGD_hook.powerSGD_hook, power_sgd, 1e-7),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(3)
def test_hook(name):
    hook, make_state, tolerance = HOOKS[name]
    small = {} if name == "powerSGD" else {"bucket_cap_mb": 0.001}
    model = DistributedDataParallel(network(), **small)
    model.register_comm_hook(make_state(), hook)
    losses = train(model, STEPS)
    assert_like(model.module, train_alone(STEPS, dist.get_world_size()), tolerance)
    assert_replicated(model.module)
    assert losses[-1] < losses[0]
