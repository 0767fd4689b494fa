"""Automatic mixed precision on CPU."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from training import (
    assert_gradients,
    assert_like,
    assert_replicated,
    assert_same,
    backward_alone,
    loss_of,
    network,
    sgd,
    train,
    train_alone,
)

STEPS = 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@on_ranks(2)
def test_autocast(dtype):
    def loss(*call):
        with torch.autocast("cpu", dtype=dtype):
            return loss_of(*call)

    model = DistributedDataParallel(network(torch.float))
    train(model, STEPS, loss_of=loss)
    assert_like(model.module, train_alone(STEPS, 2, model=network(torch.float), loss_of=loss), 2e-3)
    assert_replicated(model.module)


@on_ranks(2)
def test_gradient_scaler():
    """An infinite gradient on one rank makes every rank skip the step."""
    model = DistributedDataParallel(network(torch.float))
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = loss_of(model, dist.get_rank(), 0)
    if dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same(model.module, network(torch.float))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@on_ranks(3)
def test_whole_model_in_low_precision(dtype):
    """Parameters, gradients and buckets of low precision."""
    model = DistributedDataParallel(network(dtype))
    loss_of(model, dist.get_rank(), 0).backward()
    assert_gradients(model, backward_alone(network(dtype), 3), rtol=3e-2, atol=3e-3)
