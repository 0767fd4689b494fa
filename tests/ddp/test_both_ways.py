"""What the hook and the synchronizer both do: the training of stock DDP, norms, and what is not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from oracle import assert_alike
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_gradients, assert_replicated, assert_same, loss_of, network, sgd, train
from ways import WAYS

from fastcoll.ddp import WIRE_DTYPES

pytestmark = on_ranks(2)

STEPS = 6
SMALL = {"bucket_cap_mb": 0.0005}
UNUSED = {"find_unused_parameters": True}

each_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(("way", "options"), [
    *((way, options) for way in WAYS for options in ({}, SMALL, UNUSED)),
    ("hook", {"gradient_as_bucket_view": True}), ("hook", {"static_graph": True}),
    ("synchronizer", {**SMALL, "gradient_norm": True}),
], ids=str)  # fmt: skip
def test_training_is_that_of_stock_ddp(way, options):
    """In float32, on a number of ranks that is a power of two, bit for bit."""
    stock = DistributedDataParallel(network(torch.float))
    ours, _ = WAYS[way](network(torch.float), **options)
    assert train(ours, STEPS) == train(stock, STEPS)
    assert_same(ours, stock)
    assert_replicated(ours)


@each_way
@pytest.mark.parametrize("options", [{}, SMALL], ids=str)
@on_ranks(1, 2, 3)
def test_norm_of_the_gradients(way, options):
    model = network()
    called, statistics = WAYS[way](model, gradient_norm=True, **options)
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(called, dist.get_rank(), step).backward()
        gradients = [p.grad for p in model.parameters()]
        expected = nn.utils.get_total_norm(gradients)
        torch.testing.assert_close(statistics.grad_norm(), expected.double())
        assert statistics.found_inf.tolist() == [0.0]
        before = [grad.clone() for grad in gradients]
        limit = expected.item() / 2
        norm = statistics.clip_grad_norm_(model.parameters(), limit)
        assert torch.equal(norm, statistics.grad_norm())
        clipped = [grad.clone() for grad in gradients]
        torch._foreach_copy_(gradients, before)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        torch.testing.assert_close(clipped, gradients)
        optimizer.step()
    assert_alike(statistics.grad_norm().item())


@each_way
@pytest.mark.parametrize("wire", [None, *WIRE_DTYPES], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_gradients_that_are_not_finite_are_found_on_all_ranks(way, value, wire):
    model = network(torch.float)
    called, statistics = WAYS[way](model, wire_dtype=wire, gradient_norm=True)
    loss = loss_of(called, dist.get_rank(), 0)
    (loss * (value if dist.get_rank() == 1 else 1.0)).backward()
    assert statistics.found_inf.tolist() == [1.0], statistics.grad_norm()
    model.zero_grad()
    loss_of(called, dist.get_rank(), 1).backward()
    assert statistics.found_inf.tolist() == [0.0] and math.isfinite(statistics.grad_norm())


@each_way
def test_gradients_are_accumulated_without_communication(way):
    """no_sync: nothing is reduced, and the statistics say what they knew before."""
    model, stock = network(torch.float), DistributedDataParallel(network(torch.float))
    called, statistics = WAYS[way](model, gradient_norm=True, **SMALL)
    with pytest.raises(RuntimeError, match="there is no norm yet"):
        statistics.grad_norm()
    quiet = called.no_sync if way == "hook" else statistics.no_sync
    for each, quietly in ((called, quiet), (stock, stock.no_sync)):
        for step in range(2):
            with quietly():
                loss_of(each, dist.get_rank(), step).backward()
        loss_of(each, dist.get_rank(), 2).backward()
    assert_gradients(model, stock, rtol=0, atol=0)
    expected = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    torch.testing.assert_close(statistics.grad_norm(), expected)


class Mixed(nn.Module):
    """A part in double and a part in bfloat16."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = network(), network(torch.bfloat16)

    def forward(self, rank, step):
        return loss_of(self.wide, rank, step) + loss_of(self.narrow, rank, step)


@each_way
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_mixed_dtypes(way, wire):
    """A wire that is not narrower is left alone."""
    model = Mixed()
    called, statistics = WAYS[way](model, wire_dtype=wire, gradient_norm=True, **SMALL)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        called(dist.get_rank(), step).backward()
        expected = nn.utils.get_total_norm(p.grad.double() for p in model.parameters())
        torch.testing.assert_close(statistics.grad_norm(), expected)
        optimizer.step()
    assert_replicated(model.wide)


@each_way
def test_a_compiled_model(way):
    """torch.compile cuts a DDP model at its buckets, and leaves gradients where autograd does."""
    model, stock = (network(torch.float, width=700) for _ in range(2))
    called, _ = WAYS[way](model, gradient_norm=True, bucket_cap_mb=1)
    stock = DistributedDataParallel(stock)
    fast = torch.compile(called, backend="aot_eager")
    for step in range(3):
        for each in (fast, stock):
            each.zero_grad()
            loss_of(each, dist.get_rank(), step).backward()
        assert_gradients(model, stock)


@each_way
@on_ranks(3)
def test_the_sum_in_place_of_the_average(way, group=None):
    model, stock = network(), DistributedDataParallel(network(), process_group=group)
    called, _ = WAYS[way](model, group, average=False)
    for each in (called, stock):
        loss_of(each, dist.get_rank(), 0).backward()
    assert_gradients(model, stock, dist.get_world_size())
