"""Automatic mixed precision on CPU."""

import math

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
    parameters_of,
    sgd,
    train,
    train_alone,
)
from ways import ALL_WAYS, stock

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


def train_scaled(model):
    """Trains with torch's scaler and, in step 2 on rank 1, an infinite gradient; returns losses, scales and steps."""
    optimizer, history = sgd(model.parameters()), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        before, loss = parameters_of(model), loss_of(model, dist.get_rank(), step)
        scaler.scale(loss * (math.inf if (step, dist.get_rank()) == (2, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped = not torch.equal(before, parameters_of(model))
        history.append((loss.item(), scaler.get_scale(), stepped))
    return history


@pytest.mark.parametrize("way", ALL_WAYS)
@on_ranks(2)
def test_gradient_scaler(way):
    """An infinite gradient on one rank makes every rank skip the step; all bits are those of stock DDP on gloo."""
    ours, _ = ALL_WAYS[way](network(torch.float))
    theirs, _ = stock(network(torch.float), dist.new_group(backend="gloo"))
    history = train_scaled(ours)
    assert history == train_scaled(theirs)
    assert [row[1:] for row in history] == [(1024, True), (1024, True), (512, False), (512, True)]
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@on_ranks(3)
def test_whole_model_in_low_precision(dtype):
    """Parameters, gradients and buckets of low precision."""
    model = DistributedDataParallel(network(dtype))
    loss_of(model, dist.get_rank(), 0).backward()
    assert_gradients(model, backward_alone(network(dtype), 3), rtol=3e-2, atol=3e-3)
