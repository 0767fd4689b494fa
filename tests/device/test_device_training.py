"""DDP and FSDP over the engine of device tensors: the parameters that CPU ranks get, in checked order."""

import copy

import pytest
import recording_device
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DEVICE = "recording:0"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))


def train(model, device, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(6, 8, generator=random).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def expected_parameters():
    """Trains on CPU, over the same group's CPU half."""
    model = DistributedDataParallel(network())
    train(model, "cpu", dist.get_rank())
    return [parameter.detach() for parameter in model.module.parameters()]


def with_ddp(options):
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        model = DistributedDataParallel(network().to(DEVICE), bucket_cap_mb=0.1, **options)
        train(model, DEVICE, dist.get_rank())
        found = [parameter.detach().cpu() for parameter in model.module.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    reduced = {e.stream for e in recording_device.log("launch") if e.what == "allReduce"}
    assert reduced == {name for name in reduced if " high " in name} and reduced
    del model


def with_fsdp():
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        model = copy.deepcopy(network()).to(DEVICE)
        for layer in (model[0], model[2], model[3]):
            fully_shard(layer)
        fully_shard(model)
        train(model, DEVICE, dist.get_rank())
        found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_ddp(nccl_world, options):
    nccl_world(2).run(with_ddp, options, fresh=True)


def test_fsdp(nccl_world):
    nccl_world(2).run(with_fsdp, fresh=True)
