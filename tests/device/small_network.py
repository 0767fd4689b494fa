"""A small network and its training, on any device: what ranks must come to is what they come to on CPU."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))


def sharded(device):
    """The network under FSDP."""
    model = network().to(device)
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model, device, steps=3):
    """Each rank has its own inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(6, 8, generator=random).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def expected_parameters():
    """Trains on CPU, over the same group's CPU half."""
    model = DistributedDataParallel(network())
    train(model, "cpu")
    return [parameter.detach() for parameter in model.module.parameters()]
