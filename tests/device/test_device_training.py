"""DDP and FSDP over the engine of device tensors: the parameters that CPU ranks get, in checked order."""

import pytest
import recording_device
import torch
from small_network import expected_parameters, network, sharded, train
from torch.nn.parallel import DistributedDataParallel

import fastcoll.fsdp
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

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


def with_synchronizer(wire, tolerance):
    """Gradients reduced where they are: read and written behind what made them, before what uses them."""
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        model = network().to(DEVICE)
        synchronizer = GradientSynchronizer(
            model, wire_dtype=wire, gradient_norm=True, bucket_cap_mb=0.1
        )
        train(model, DEVICE)
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        torch.testing.assert_close(synchronizer.grad_norm().cpu().float(), norm.cpu())
        found = [parameter.detach().cpu() for parameter in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def with_fsdp(wire, tolerance):
    """FSDP2, with its own collectives (False) or with fastcoll.fsdp's, in a wire dtype or none."""
    expected = expected_parameters()
    recording_device.clear()
    with recording_device.no_violations():
        model = sharded(DEVICE)
        if wire is not False:
            fastcoll.fsdp.apply(model, wire_dtype=wire)
        train(model, DEVICE)
        found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_ddp(nccl_world, options):
    nccl_world(2).run(with_ddp, options, fresh=True)


@pytest.mark.parametrize(
    ("wire", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 5e-2)]
)
def test_ddp_with_the_fused_hook(nccl_world, wire, tolerance):
    nccl_world(2).run(with_fused_hook, wire, tolerance, fresh=True)


@pytest.mark.parametrize(
    ("wire", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 5e-2)]
)
def test_a_synchronizer(nccl_world, wire, tolerance):
    nccl_world(2).run(with_synchronizer, wire, tolerance, fresh=True)


@pytest.mark.parametrize(
    ("wire", "tolerance"), [(False, 1e-5), (None, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_fsdp(nccl_world, wire, tolerance):
    nccl_world(2).run(with_fsdp, wire, tolerance, fresh=True)
