"""DDP and FSDP over the engine of device tensors: the parameters that CPU ranks get, in checked order."""

import pytest
import recording_device
import torch
from small_network import expected_parameters, network, sharded, train
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, fused_allreduce_hook

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


def with_fused_hook(wire, tolerance):
    """fastcoll's hook: its copies before and behind the collectives are ordered too."""
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        state = FusedAllreduceState(wire_dtype=wire, gradient_norm=True)
        model = DistributedDataParallel(network().to(DEVICE), bucket_cap_mb=0.1)
        model.register_comm_hook(state, fused_allreduce_hook)
        train(model, DEVICE)
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        torch.testing.assert_close(state.grad_norm().cpu().float(), norm.cpu())
        found = [parameter.detach().cpu() for parameter in model.module.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
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


@pytest.mark.parametrize(
    ("wire", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 5e-2)]
)
def test_ddp_with_the_fused_hook(nccl_world, wire, tolerance):
    nccl_world(2).run(with_fused_hook, wire, tolerance, fresh=True)


def test_fsdp(nccl_world):
    nccl_world(2).run(with_fsdp, fresh=True)
