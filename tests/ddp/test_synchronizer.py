"""GradientSynchronizer: the training of DistributedDataParallel without its buckets and wrapper."""

import math

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from oracle import assert_alike
from torch import nn
from training import assert_same, loss_of, network, sgd

from fastcoll.ddp import WIRE_DTYPES, GradientSynchronizer

pytestmark = on_ranks(2)

SMALL = {"bucket_cap_mb": 0.0005}


def test_buffers_are_those_of_rank_0():
    """Each rank's batch moves its statistics; the next forward pass takes rank 0's."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    GradientSynchronizer(model)
    for step in range(2):
        inputs = torch.randn(
            8, 3, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step)
        )
        model(inputs).square().sum().backward()
    mine = model[1].running_mean.clone()
    model.eval()
    model(inputs)  # on this rank alone: nothing is sent
    assert torch.equal(model[1].running_mean, mine)
    model.train()
    model(inputs)
    first = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(first, mine)
    expected = 0.9 * first[0] + 0.1 * model[0](inputs).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected)


@pytest.mark.parametrize("wire", [None, *WIRE_DTYPES], ids=str)
@on_ranks(1, 2)
def test_clipping_in_the_step(wire):
    """The norm is that of the reduced gradients, and the step that clips is the step after clipping."""
    models = [network(torch.float), network(torch.float)]
    synchronizers = [
        GradientSynchronizer(m, wire_dtype=wire, gradient_norm=True, **SMALL) for m in models
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=True) for m in models]
    for step in range(3):
        for model in models:
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        expected = torch.nn.utils.get_total_norm([p.grad.double() for p in models[0].parameters()])
        torch.testing.assert_close(synchronizers[0].grad_norm(), expected)
        limit = expected.item() / 3
        synchronizers[0].clip_in_step(optimizers[0], limit)
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), limit)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(*(list(model.parameters()) for model in models))
    assert_alike(synchronizers[0].grad_norm().item())


def test_a_step_over_infinite_gradients_does_nothing():
    """A step over gradients that are not finite does nothing, on any rank."""
    model = network(torch.float)
    synchronizer = GradientSynchronizer(model, gradient_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    loss = loss_of(model, dist.get_rank(), 0)
    (loss * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    synchronizer.clip_in_step(optimizer, 1.0)
    optimizer.step()
    assert synchronizer.found_inf.tolist() == [1.0]
    assert_same(model, network(torch.float))


def test_clipping_holds_for_one_step():
    """A step that nobody asked to clip is not clipped, nor skipped."""
    model = network(torch.float)
    synchronizer = GradientSynchronizer(model, gradient_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    loss_of(model, dist.get_rank(), 0).backward()
    with pytest.raises(ValueError, match="expected a max_norm above 0, got -1"):
        synchronizer.clip_in_step(optimizer, -1)
    synchronizer.clip_in_step(optimizer, 1e-6)
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - parameter.grad)


@on_ranks(1)
def test_an_optimizer_that_cannot_clip_is_refused():
    model = network()
    synchronizer = GradientSynchronizer(model, gradient_norm=True)
    loss_of(model, dist.get_rank(), 0).backward()
    with pytest.raises(
        TypeError, match=r"expected an optimizer that scales.*got SGD without fused=True"
    ):
        synchronizer.clip_in_step(sgd(model.parameters()), 1.0)


def test_without_it_gradients_are_the_ranks_own():
    model = network()
    synchronizer = GradientSynchronizer(model)
    synchronizer.remove()
    loss_of(model, dist.get_rank(), 0).backward()
    mine = model[0].weight.grad.clone()
    summed = mine.clone()
    dist.all_reduce(summed)
    assert not torch.equal(summed, 2 * mine)
