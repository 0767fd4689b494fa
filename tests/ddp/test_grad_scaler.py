"""FusedGradScaler: torch's loss scaling, told by the reduction what is not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from training import assert_same, loss_of, network
from ways import WAYS, synchronized

from fastcoll.ddp import FusedAllreduceState, FusedGradScaler

OPTIMIZERS = {
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def step(model, scaler, optimizer, number, max_norm, factor=1.0):
    optimizer.zero_grad()
    loss = loss_of(model, dist.get_rank(), number) * factor
    scaler.scale(loss).backward()
    if max_norm is not None:
        if isinstance(scaler, FusedGradScaler):
            scaler.clip_grad_norm_(optimizer, max_norm)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("max_norm", [None, 0.1])
@on_ranks(2)
def test_training_is_that_of_the_stock_scaler(kind, name, max_norm):
    """One step is not finite, on one rank alone: it is skipped, and the scale falls, on both."""
    ours, statistics = WAYS[kind](network(torch.float), gradient_norm=True)
    stock = DistributedDataParallel(network(torch.float))
    options = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 3}
    scalers = [FusedGradScaler(statistics, **options), torch.amp.GradScaler(**options)]
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (ours, stock)]
    scales = []
    for number in range(9):
        factor = math.inf if number == 5 and dist.get_rank() == 1 else 1.0
        for model, scaler, optimizer in zip((ours, stock), scalers, optimizers, strict=True):
            step(model, scaler, optimizer, number, max_norm, factor)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    assert scales[4] > scales[0] and scales[5] < scales[4], scales  # it rose and fell
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@on_ranks(2)
def test_clipping_without_a_step_is_forgotten(name):
    """A training step that was left out leaves no clipping to the next one."""
    models = [network(torch.float), network(torch.float)]
    scalers, optimizers = [], []
    for model in models:
        statistics = synchronized(model, gradient_norm=True)[1]
        scalers.append(FusedGradScaler(statistics, device="cpu", init_scale=256.0))
        optimizers.append(OPTIMIZERS[name](model.parameters()))
    # One asks to clip, then takes no step; the other never asks.
    for number, clips in ((0, True), (1, False)):
        for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, dist.get_rank(), number)).backward()
            if clips:
                if model is models[0]:
                    scaler.clip_grad_norm_(optimizer, 1e-3)
                scaler.unscale_(torch.optim.SGD(model.parameters()))  # update() wants one
            else:
                scaler.step(optimizer)
            scaler.update()
    assert_same(*models)


@on_ranks(2)
def test_clipping_after_unscaling():
    """In torch's usual order, and for that step alone."""
    model, statistics = synchronized(network(torch.float), gradient_norm=True)
    scaler = FusedGradScaler(statistics, device="cpu", init_scale=256.0)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with pytest.raises(RuntimeError, match="there is no norm yet"):
        scaler.clip_grad_norm_(optimizer, 0.1)
    for clip in (True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dist.get_rank(), 0)).backward()
        scaler.unscale_(optimizer)
        true = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert true > 0.11
        if clip:
            norm = scaler.clip_grad_norm_(optimizer, 0.1)
            torch.testing.assert_close(norm.float(), true)
            left = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            assert left.item() == pytest.approx(0.1, rel=1e-3)
        scaler.step(optimizer)
        scaler.update()


@on_ranks(2)
def test_unscaling_and_clipping_touch_no_gradient():
    """With an optimizer that scales in its step, nothing but the step touches a gradient."""
    model, statistics = synchronized(network(torch.float), gradient_norm=True)
    scaler = FusedGradScaler(statistics, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler.scale(loss_of(model, dist.get_rank(), 0)).backward()
    addresses = {p.grad.data_ptr() for p in model.parameters()}
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [
                t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
            ]
            if any(t.data_ptr() in addresses for t in tensors if t.device.type == "cpu"):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert [name for name in seen if "_fused_sgd_" not in name] == [], seen
    assert seen, "the step itself was not seen"


@on_ranks(1)
def test_disabled():
    model, statistics = synchronized(network(torch.float), gradient_norm=True)
    scaler = FusedGradScaler(statistics, device="cpu", enabled=False)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    loss_of(model, dist.get_rank(), 0).backward()
    norm = scaler.clip_grad_norm_(optimizer, 0.1)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm > 0.1 and clipped.item() == pytest.approx(0.1, rel=1e-3)
    scaler.step(optimizer)


def test_statistics_without_a_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a FusedAllreduceState with gradient_norm=True"):
        FusedGradScaler(FusedAllreduceState())
