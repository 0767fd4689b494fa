"""Automatic mixed precision on CPU."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, loss_of, network, sgd
from world import on_ranks

STEPS = 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@on_ranks(2)
def test_autocast(dtype):
    size = dist.get_world_size()
    model = DistributedDataParallel(network(torch.float))
    alone = network(torch.float)
    optimizers = [sgd(model.parameters()), sgd(alone.parameters())]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, dist.get_rank(), step, torch.float)
        loss.backward()
        for rank in range(size):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(alone, rank, step, torch.float) / size
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_like(model.module, alone, 2e-3)
    assert_replicated(model.module)


@on_ranks(2)
def test_gradient_scaler():
    """An infinite gradient on one rank makes every rank skip the step."""
    model = DistributedDataParallel(network(torch.float))
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, dist.get_rank(), 0, torch.float)
    if dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@on_ranks(3)
def test_whole_model_in_low_precision(dtype):
    """Parameters, gradients and buckets of low precision."""
    model = DistributedDataParallel(network(dtype))
    loss_of(model, dist.get_rank(), 0, dtype).backward()
    alone, size = network(dtype), dist.get_world_size()
    gradients = []
    for rank in range(size):
        alone.zero_grad()
        loss_of(alone, rank, 0, dtype).backward()
        gradients.append([p.grad.float() for p in alone.parameters()])
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad.dtype == dtype
        expected = sum(of_rank[number] for of_rank in gradients) / size
        torch.testing.assert_close(parameter.grad.float(), expected, rtol=3e-2, atol=3e-3)
    assert_replicated(network(torch.float))
