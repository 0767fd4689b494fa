"""DDP and FSDP over the engine of device tensors: the parameters that CPU ranks get, in checked order."""

import pytest
import recording_device
import torch
from small_network import expected_parameters, network, sharded, train
from torch.nn.parallel import DistributedDataParallel

DEVICE = "recording:0"


def with_ddp(options):
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        model = DistributedDataParallel(network().to(DEVICE), bucket_cap_mb=0.1, **options)
        train(model, DEVICE)
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
        model = sharded(DEVICE)
        train(model, DEVICE)
        found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_ddp(nccl_world, options):
    nccl_world(2).run(with_ddp, options, fresh=True)


def test_fsdp(nccl_world):
    nccl_world(2).run(with_fsdp, fresh=True)
