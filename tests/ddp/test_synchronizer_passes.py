"""GradientSynchronizer and backward passes: frozen and unused parameters, several losses, checkpoints."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import (
    Branches,
    assert_gradients,
    assert_same,
    backward_alone,
    batch,
    loss_by_turns,
    loss_of,
    network,
    sgd,
)

from fastcoll.ddp import GradientSynchronizer

pytestmark = on_ranks(2)

SMALL = {"bucket_cap_mb": 0.0005}


def test_parameters_frozen_and_unfrozen():
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
        loss_of(ours, dist.get_rank(), step).backward()
        wrapped = DistributedDataParallel(stock)
        loss_of(wrapped, dist.get_rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same(ours, stock)


class WithInputs(nn.Module):
    """Outputs that depend on the inputs, and on parameters only where asked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs, through):
        return (self.layer(inputs) if through else inputs * 2.0).sum()


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_pass_that_reaches_no_parameter_of_a_rank(wire):
    """On one rank the loss depends on the module's inputs alone; later on both."""
    model, rank = WithInputs(), dist.get_rank()
    synchronizer = GradientSynchronizer(
        model, wire_dtype=wire, find_unused_parameters=True, gradient_norm=True, **SMALL
    )
    for step in range(4):
        model.zero_grad()
        inputs = torch.full((3, 4), 1.0 + step, requires_grad=True)
        model(inputs, rank == step % 2).backward()
        mean = torch.full((4, 4), 3 * (1.0 + step) / 2)
        torch.testing.assert_close(model.layer.weight.grad, mean, rtol=1e-6, atol=0.0)
        expected = torch.nn.utils.get_total_norm(p.grad.double() for p in model.parameters())
        torch.testing.assert_close(synchronizer.grad_norm(), expected)
        assert inputs.grad is not None
    model.zero_grad()
    model(inputs, False).backward()
    assert [p.grad for p in model.parameters()] == [None, None]


def test_a_pass_through_frozen_parameters():
    """A generator's step through its discriminator; what is known of the step before stays."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    synchronizer = GradientSynchronizer(
        model, find_unused_parameters=True, gradient_norm=True, **SMALL
    )
    for step in range(2):
        model.zero_grad()
        model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
        norm = synchronizer.grad_norm()
        model.requires_grad_(False)
        inputs = torch.full((3, 4), 1.0 + step, requires_grad=True)
        model(inputs).sum().backward()
        assert inputs.grad is not None
        assert torch.equal(synchronizer.grad_norm(), norm)
        model.requires_grad_(True)
    assert norm > 0


@on_ranks(1)
def test_a_parameter_left_out_is_named():
    model = Branches()
    GradientSynchronizer(model)
    loss = loss_by_turns(model, 0, 0)
    with pytest.raises(
        RuntimeError, match=r"got none for .*heads\.2\.weight.*find_unused_parameters=True"
    ):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"got none for .*heads\.2\.weight"):
        loss_by_turns(model, 0, 0)


def test_two_losses_of_one_forward_pass():
    """Two losses of one forward pass: what the first has reduced is equal on all ranks, and stays."""
    model = network()
    GradientSynchronizer(model, **SMALL)
    output = model(batch(dist.get_rank(), 0)[0])
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()

    def both(model, rank, step):
        output = model(batch(rank, step)[0])
        return output.sum() + output.square().sum()

    assert_gradients(model, backward_alone(network(), dist.get_world_size(), loss_of=both))


def test_two_forward_passes():
    """Each with a backward pass of its own: the gradients are added up, as without ranks."""
    model = network()
    GradientSynchronizer(model, **SMALL)
    losses = [loss_of(model, dist.get_rank(), step) for step in range(2)]
    for loss in losses:
        loss.backward()
    assert_gradients(model, backward_alone(network(), dist.get_world_size(), steps=(0, 1)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = network(), nn.Linear(5, 5).double(), reentrant

    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    torch.manual_seed(3)
    ours, stock = Checkpointed(reentrant), Checkpointed(False)
    stock.load_state_dict(ours.state_dict())
    GradientSynchronizer(ours, **SMALL)
    wrapped = DistributedDataParallel(stock)
    for step in range(2):
        for model in (ours, wrapped):
            loss_of(model, dist.get_rank(), step).backward()
    assert_gradients(ours, stock)


class Tied(nn.Module):
    """One layer in two reentrant checkpoints, whose gradient comes twice; the last to come, or not."""

    def __init__(self, behind):
        super().__init__()
        self.tied = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4) if behind else nn.Identity()

    def forward(self, inputs):
        hidden = self.first(inputs.requires_grad_())
        for _ in range(2):
            hidden = checkpoint(self.tied, hidden, use_reentrant=True)
        return hidden.sum()


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@on_ranks(1)
def test_a_layer_in_two_reentrant_checkpoints_is_refused(behind, options):
    model = Tied(behind)
    GradientSynchronizer(model, **SMALL, **options)
    with pytest.raises(
        RuntimeError, match=r"a second one of tied\.(weight|bias).*use_reentrant=False"
    ):
        model(torch.ones(3, 4)).backward()


def test_parameters_frozen_from_the_start():
    """As an adapter over a frozen base; the base is unfrozen later."""
    model, alone = network(), network()
    model[0].requires_grad_(False)
    GradientSynchronizer(model, **SMALL)
    for step in range(3):
        for each in (model, alone):
            each[0].requires_grad_(step == 2)
        loss_of(model, dist.get_rank(), step).backward()
        backward_alone(alone, dist.get_world_size(), [step])
    assert_gradients(model, alone)


class InTurns(nn.Module):
    """Layers of one shape, whose gradients become ready in an order that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs, first):
        order = [(first + step) % 3 for step in range(3)]
        return sum((layer + 1) * self.layers[layer](inputs).sum() for layer in order)


def test_gradients_become_ready_in_another_order_on_each_rank():
    model, rank = InTurns(), dist.get_rank()
    GradientSynchronizer(model, overlap=True, bucket_cap_mb=1e-5)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0), rank).backward()
        for number, layer in enumerate(model.layers, 1):
            assert layer.weight.grad.eq(3.0 * number).all(), layer.weight.grad
