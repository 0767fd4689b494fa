"""GradientSynchronizer and what models do: frozen and unused parameters, checkpoints, mixed dtypes, copies."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import assert_replicated, loss_of, network, sgd

from fastcoll.ddp import GradientSynchronizer

SMALL = {"bucket_cap_mb": 0.0005}


def freezes():
    """Frozen, unfrozen, set to None or zeroed: what trains is what DDP would train."""
    ours, stock = network(torch.float), network(torch.float)
    GradientSynchronizer(ours, **SMALL)
    optimizers = [sgd(ours.parameters()), sgd(stock.parameters())]
    for step in range(8):
        frozen = step // 2 % 2 == 1
        for model in (ours, stock):
            model[0].requires_grad_(not frozen)
            model[2].bias.requires_grad_(step % 3 != 0)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ours, dist.get_rank(), step, torch.float).backward()
        wrapped = DistributedDataParallel(stock)
        loss_of(wrapped, dist.get_rank(), step, torch.float).backward()
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert torch.equal(a, b), step


def test_parameters_frozen_and_unfrozen(world):
    world(2).run(freezes)


class Branches(nn.Module):
    """Uses one of two layers, and a third never."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs, take_one):
        return (self.one if take_one else self.two)(inputs).sum()


def unused():
    model, rank = Branches(), dist.get_rank()
    GradientSynchronizer(model, find_unused_parameters=True, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    kept = model.never.weight.clone()
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.full((3, 4), 1.0 + rank)
        model(inputs, (step + rank) % 2 == 0).backward()
        # Each layer is used by one rank of two: the mean is half of what that rank has.
        for layer, user in ((model.one, step % 2), (model.two, 1 - step % 2)):
            assert torch.equal(layer.weight.grad, torch.full((2, 4), 3 * (1.0 + user) / 2))
        assert model.never.weight.grad is None
        optimizer.step()
    assert torch.equal(model.never.weight, kept)
    assert_replicated(model)


def test_unused_parameters(world):
    world(2).run(unused)


def left_out():
    model = Branches()
    GradientSynchronizer(model)
    model(torch.ones(3, 4), True).backward()
    with pytest.raises(
        RuntimeError, match=r"got none for .*never\.weight.*find_unused_parameters=True"
    ):
        model(torch.ones(3, 4), True)


def test_a_parameter_left_out_is_named(world):
    world(1).run(left_out)


def two_passes():
    """Two losses one after the other: the second pass would reduce what the first has reduced."""
    model = Branches()
    synchronizer = GradientSynchronizer(model, bucket_cap_mb=0.0001)
    inputs = torch.ones(3, 4)
    losses = [model(inputs, True), model(inputs, True)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match=r"got a second one of one\.(weight|bias).*no_sync\(\)"):
        losses[1].backward()
    synchronizer.remove()


def test_a_second_pass_is_refused(world):
    world(1).run(two_passes)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = network(), nn.Linear(5, 5).double(), reentrant

    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant)


def checkpoints(reentrant):
    torch.manual_seed(3)
    ours, stock = Checkpointed(reentrant), Checkpointed(False)
    stock.load_state_dict(ours.state_dict())
    GradientSynchronizer(ours, **SMALL)
    wrapped = DistributedDataParallel(stock)
    for step in range(2):
        for model in (ours, wrapped):
            loss_of(model, dist.get_rank(), step).backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(world, reentrant):
    world(2).run(checkpoints, reentrant)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = network(), network(torch.bfloat16)

    def forward(self, rank, step):
        return loss_of(self.wide, rank, step) + loss_of(self.narrow, rank, step, torch.bfloat16)


def mixed(wire):
    model = Mixed()
    synchronizer = GradientSynchronizer(model, wire_dtype=wire, gradient_norm=True, **SMALL)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(dist.get_rank(), step).backward()
        expected = torch.nn.utils.get_total_norm(p.grad.double() for p in model.parameters())
        torch.testing.assert_close(synchronizer.grad_norm(), expected)
        optimizer.step()
    assert_replicated(model.wide)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_mixed_dtypes(world, wire):
    world(2).run(mixed, wire)


def copied():
    """An average of the weights, say, that one rank computes: its copy takes part in nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    GradientSynchronizer(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
    if dist.get_rank() == 0:
        for each in copies:
            each(torch.ones(2, 3)).sum().backward()
            assert each[0].weight.grad is not None
    model(torch.ones(2, 3)).sum().backward()


def test_a_copy_of_the_module_is_free(world):
    world(2).run(copied)


def sparse():
    model = nn.Embedding(10, 3, sparse=True)
    GradientSynchronizer(model)
    with pytest.raises(
        TypeError, match=r"expected dense gradients, got one of layout torch\.sparse_coo of weight"
    ):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused(world):
    world(1).run(sparse)


def compiled():
    """torch.compile's graphs leave their gradients where autograd does."""
    ours, stock = network(torch.float), network(torch.float)
    GradientSynchronizer(ours)
    fast = torch.compile(ours, backend="aot_eager")
    wrapped = DistributedDataParallel(stock)
    for step in range(2):
        loss_of(fast, dist.get_rank(), step, torch.float).backward()
        loss_of(wrapped, dist.get_rank(), step, torch.float).backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_compiled_module(world):
    world(2).run(compiled)
