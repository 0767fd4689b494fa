"""Stock DistributedDataParallel against one process with all the data."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    assert_gradients,
    assert_like,
    assert_replicated,
    batch,
    loss_of,
    network,
    parameters_of,
    sgd,
    train,
    train_alone,
)
from world import on_ranks

STEPS = 5
MANY_BUCKETS = {"bucket_cap_mb": 0.001}
OPTIONS = {
    "plain": {},
    "many_buckets": MANY_BUCKETS,
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True, **MANY_BUCKETS},
    "find_unused_parameters": {"find_unused_parameters": True, **MANY_BUCKETS},
    "no_buffer_broadcast": {"broadcast_buffers": False},
}
if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
    OPTIONS["batched_grad_copy"] = {"batched_grad_copy": True}


def train_with(options):
    model = DistributedDataParallel(network(), **options)
    losses = train(model, STEPS)
    assert_like(model.module, train_alone(STEPS, dist.get_world_size()))
    assert_replicated(model.module)
    return losses


class Branches(nn.Module):
    """Uses one of two layers: which one depends on the input."""

    def __init__(self):
        super().__init__()
        self.trunk = network()
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))

    def forward(self, inputs, head):
        return self.heads[head](self.trunk(inputs))


class Parts(nn.Module):
    """Checks that memory formats and half-precision parameters go through buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4, 2)

    def forward(self, images):
        return self.last(self.conv(images).mean((2, 3)))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(world, name):
    world(3).run(train_with, OPTIONS[name])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_world_size(world, size):
    losses = world(size).run(train_with, MANY_BUCKETS)
    assert all(loss[-1] < loss[0] for loss in losses)


@on_ranks(3)
def test_start_from_rank_zero():
    """DDP hands rank 0's weights and buffers to the others."""
    model = nn.Sequential(network(), nn.BatchNorm1d(5).double())
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(dist.get_rank())
    wrapped = DistributedDataParallel(model)
    assert torch.equal(parameters_of(wrapped.module[0]), parameters_of(network()))
    assert model[1].running_mean.sum() == 0
    wrapped(batch(dist.get_rank(), 0)[0]).sum().backward()
    wrapped(batch(dist.get_rank(), 1)[0])  # broadcasts the buffers first
    assert model[1].num_batches_tracked == 2
    assert_replicated(model)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_ranks(3)
def test_no_sync(view):
    size = dist.get_world_size()
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view, **MANY_BUCKETS)
    alone = network()
    with model.no_sync():
        loss_of(model, dist.get_rank(), 0).backward()
    own = network()
    loss_of(own, dist.get_rank(), 0).backward()
    assert_gradients(model, own, rtol=1e-12, atol=1e-14)
    loss_of(model, dist.get_rank(), 1).backward()
    for rank in range(size):
        ((loss_of(alone, rank, 0) + loss_of(alone, rank, 1)) / size).backward()
    assert_gradients(model, alone, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_unused_parameters():
    """Every rank goes through another head; the third is used by nobody."""
    size = dist.get_world_size()
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    alone = Branches()
    optimizers = [sgd(model.parameters()), sgd(alone.parameters())]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, labels = batch(dist.get_rank(), step)
        head = (dist.get_rank() + step) % 2
        nn.functional.cross_entropy(model(inputs, head), labels).backward()
        for rank in range(size):
            inputs, labels = batch(rank, step)
            outputs = alone(inputs, (rank + step) % 2)
            (nn.functional.cross_entropy(outputs, labels) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert model.module.heads[2].weight.grad is None
    assert_like(model.module, alone)
    assert_replicated(model.module)


@on_ranks(2)
def test_channels_last():
    size = dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    images = torch.randn(size, 4, 3, 6, 6, generator=random)
    model, alone = DistributedDataParallel(Parts()), Parts()
    model(images[dist.get_rank()].to(memory_format=torch.channels_last)).square().sum().backward()
    sum(alone(images[r]).square().sum() / size for r in range(size)).backward()
    assert_gradients(model, alone, rtol=1e-4, atol=1e-5)


@on_ranks(4, fresh=True)
def test_replicas_in_subgroups():
    """Two replicas of two ranks each, side by side."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    team = dist.get_rank() // 2
    model = DistributedDataParallel(network(), process_group=groups[team])
    optimizer = sgd(model.parameters())
    alone = network()
    alone_optimizer = sgd(alone.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        alone_optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        for rank in (2 * team, 2 * team + 1):
            (loss_of(alone, rank, step) / 2).backward()
        optimizer.step()
        alone_optimizer.step()
    assert_like(model.module, alone)
