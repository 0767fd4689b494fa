"""DDP and FSDP on recorded device tensors: parameters are those of one process, and streams are in order."""

import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, network, sharded, train, train_alone

import fastcoll.fsdp
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

DEVICE = "recording:0"
WIDTH = 256
"""More than one bucket of 0.1 MB."""


def on_device():
    return network(torch.float, WIDTH).to(DEVICE)


def ddp(**options):
    return DistributedDataParallel(on_device(), bucket_cap_mb=0.1, **options), None


def fused_hook(wire, overlap=None):
    """fastcoll's hook: its copies before and behind the collectives are ordered too."""
    state = FusedAllreduceState(wire_dtype=wire, gradient_norm=True, overlap=overlap)
    model, _ = ddp()
    model.register_comm_hook(state, fused_allreduce_hook)
    return model, state.grad_norm


def synchronizer(wire):
    """Gradients reduced where they are: read and written behind what made them, before what uses them."""
    model = on_device()
    options = {"wire_dtype": wire, "gradient_norm": True, "bucket_cap_mb": 0.1}
    return model, GradientSynchronizer(model, **options).grad_norm


def fsdp(**options):
    """FSDP2, with its own collectives or, given a wire dtype or None, with fastcoll.fsdp's."""
    model = sharded(on_device())
    if options:
        fastcoll.fsdp.apply(model, wire_dtype=options["wire"])
    return model, None


WIRES = [(None, 1e-5), (torch.bfloat16, 1e-3)]


@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        (ddp, {}, 1e-6),
        (ddp, {"gradient_as_bucket_view": True}, 1e-6),
        *((fused_hook, {"wire": w, "overlap": False}, t) for w, t in WIRES),
        (fsdp, {}, 1e-5),
        *((make, {"wire": w}, t) for make in (fused_hook, synchronizer, fsdp) for w, t in WIRES),
    ],
)
@on_ranks(2, world="nccl_world", fresh=True)
def test_training(make, options, tolerance):
    expected = train_alone(3, 2, model=network(torch.float, WIDTH))
    with recording_device.no_violations():
        model, norm = make(**options)
        train(model, 3)
        if norm is not None:
            total = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            torch.testing.assert_close(norm().cpu().float(), total.cpu())
        assert_like(model, expected, tolerance)
    if make is ddp:
        reduced = {e.stream for e in recording_device.log("launch") if e.what == "allReduce"}
        assert reduced == {name for name in reduced if " high " in name} and reduced


class Weights(torch.nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, layout):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(6, 5, 3, 2, device=DEVICE).to(memory_format=layout)
        )

    def forward(self, inputs):
        return (self.weight * inputs).sum()


LAST, ROWS = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("layouts", [(LAST, LAST), (ROWS, LAST), (LAST, ROWS)])
@pytest.mark.parametrize("gradients", [(None, None), (ROWS, None), (LAST, ROWS)])
@on_ranks(2, world="nccl_world")
def test_gradients_have_the_layout_of_their_parameters_or_any(layouts, gradients, wire):
    """Gradients in the layout of rank 0's parameters are not copied; those of other ranks may differ."""
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(3)
    given = torch.randint(-8, 9, (2, 6, 5, 3, 2), generator=random).float()
    model = Weights(layouts[rank])
    synchronizer = GradientSynchronizer(model, wire_dtype=wire, gradient_norm=True)
    if gradients[rank] is not None:  # accumulates into it
        model.weight.grad = torch.zeros_like(model.weight, memory_format=gradients[rank])
    inputs = given[rank].to(DEVICE).to(memory_format=layouts[rank])
    loss = model(inputs)
    with recording_device.no_violations():
        loss.backward()
        if layouts == (LAST, LAST) and gradients == (None, None) and wire is None:
            copies = [e for e in recording_device.log("launch") if e.what == "aten::copy_"]
            copied = {touch.bytes for entry in copies for touch in entry.touches}
            assert copied == {8}, copied  # the squares
        assert torch.equal(model.weight.grad.cpu(), given.mean(0))
        torch.testing.assert_close(synchronizer.grad_norm().cpu().float(), given.mean(0).norm())
