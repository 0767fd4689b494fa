"""GradientSynchronizer and what models do: frozen and unused parameters, checkpoints, mixed dtypes, copies."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
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


class WithInputs(nn.Module):
    """Outputs that depend on the inputs, and on parameters only where asked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs, through):
        return (self.layer(inputs) if through else inputs * 2.0).sum()


def reaches_no_parameter_here(wire):
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


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pass_that_reaches_no_parameter_of_a_rank(world, wire):
    world(2).run(reaches_no_parameter_here, wire)


def all_frozen():
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


def test_a_pass_through_frozen_parameters(world):
    world(2).run(all_frozen)


def left_out():
    model = Branches()
    GradientSynchronizer(model)
    loss = model(torch.ones(3, 4), True)
    with pytest.raises(
        RuntimeError, match=r"got none for .*never\.weight.*find_unused_parameters=True"
    ):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"got none for .*never\.weight"):
        model(torch.ones(3, 4), True)


def test_a_parameter_left_out_is_named(world):
    world(1).run(left_out)


def two_passes():
    """Two losses of one forward pass: what the first has reduced is equal on all ranks, and stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    alone = copy.deepcopy(model)
    GradientSynchronizer(model, **SMALL)
    output = model(torch.full((3, 4), 1.0 + dist.get_rank(), dtype=torch.double))
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    for rank in range(dist.get_world_size()):
        output = alone(torch.full((3, 4), 1.0 + rank, dtype=torch.double))
        ((output.sum() + output.square().sum()) / dist.get_world_size()).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def two_forwards():
    """Each with a backward pass of its own: the gradients are added up, as without ranks."""
    torch.manual_seed(0)
    model, size = network(), dist.get_world_size()
    alone = network()
    GradientSynchronizer(model, **SMALL)
    losses = [loss_of(model, dist.get_rank(), step) for step in range(2)]
    for loss in losses:
        loss.backward()
    for step in range(2):
        for rank in range(size):
            (loss_of(alone, rank, step) / size).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_two_forward_passes(world):
    world(2).run(two_forwards)


def test_two_losses_of_one_forward_pass(world):
    world(2).run(two_passes)


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


def tied(behind, options):
    model = Tied(behind)
    GradientSynchronizer(model, **SMALL, **options)
    with pytest.raises(
        RuntimeError, match=r"a second one of tied\.(weight|bias).*use_reentrant=False"
    ):
        model(torch.ones(3, 4)).backward()


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_layer_in_two_reentrant_checkpoints_is_refused(world, behind, options):
    world(1).run(tied, behind, options)


def frozen_first():
    """As an adapter over a frozen base; the base is unfrozen later."""
    model = network()
    model[0].requires_grad_(False)
    alone = network()
    alone[0].requires_grad_(False)
    GradientSynchronizer(model, **SMALL)
    size = dist.get_world_size()
    for step in range(3):
        if step == 2:
            for each in (model, alone):
                each[0].requires_grad_(True)
        loss_of(model, dist.get_rank(), step).backward()
        for rank in range(size):
            (loss_of(alone, rank, step) / size).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_parameters_frozen_from_the_start(world):
    world(2).run(frozen_first)


def loads_with_assign(part):
    """Other parameters in the place of those that are reduced: no gradient may stay unreduced in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    synchronizer = GradientSynchronizer(model)
    inputs = torch.full((2, 4), 1.0 + dist.get_rank())
    model(inputs).sum().backward()
    loaded = model if part == "whole" else model[1]
    state = {name: torch.full_like(value, 0.5) for name, value in loaded.state_dict().items()}
    loaded.load_state_dict(state)
    model(inputs).sum().backward()
    loaded.load_state_dict(state, assign=True)
    with torch.no_grad():
        model(inputs)
    with pytest.raises(
        RuntimeError, match=r"got another one as [01]\.weight.*load_state_dict\(assign=True\)"
    ):
        model(inputs)
    synchronizer.remove()
    GradientSynchronizer(model)
    model.zero_grad()
    model(inputs).square().sum().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(2):
        (alone(torch.full((2, 4), 1.0 + rank)).square().sum() / 2).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("part", ["whole", "part"])
def test_parameters_that_were_replaced(world, part):
    world(2).run(loads_with_assign, part)


def called_with_others():
    """torch.func's values for a call are nobody's parameters, and pruned ones have another name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    GradientSynchronizer(model)
    inputs = torch.full((2, 4), 1.0 + dist.get_rank())
    values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, values, inputs).sum().backward()
    assert values["0.weight"].grad is not None and model[0].weight.grad is None
    prune.identity(model[0], "weight")
    model(inputs).sum().backward()
    reduced = model[0].weight_orig.grad.clone()
    dist.all_reduce(reduced)
    assert torch.equal(reduced, 2 * model[0].weight_orig.grad)


def test_values_for_a_call_and_pruning(world):
    world(2).run(called_with_others)


def other_dtype():
    """Part of the module changes its dtype: buckets follow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    GradientSynchronizer(model)
    inputs = torch.full((2, 4), 1.0 + dist.get_rank())
    model(inputs).sum().backward()
    model.zero_grad()
    model[1].double()
    model[1](model[0](inputs).double()).sum().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(2):
        inputs = torch.full((2, 4), 1.0 + rank)
        (alone[1](alone[0](inputs).double()).sum() / 2).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_a_change_of_dtype(world):
    world(2).run(other_dtype)


def freed():
    """A module that nobody holds is gone with its synchronizer."""
    model = nn.Linear(4, 4)
    synchronizer = GradientSynchronizer(model)
    model(torch.ones(2, 4)).sum().backward()
    left = [weakref.ref(model), weakref.ref(synchronizer)]
    del model, synchronizer
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_module_and_synchronizer_are_freed(world):
    world(2).run(freed)


def refused():
    with pytest.raises(ValueError, match="some on device meta"):
        GradientSynchronizer(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="lazy ones"):
        GradientSynchronizer(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="got ReLU without"):
        GradientSynchronizer(nn.ReLU())
    with pytest.raises(ValueError, match="got DistributedDataParallel"):
        GradientSynchronizer(DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="a group that this rank is in"):
        GradientSynchronizer(nn.Linear(2, 2), dist.GroupMember.NON_GROUP_MEMBER)
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(
        RuntimeError, match=r"weight of \(2, 2\) torch\.float32 on rank 0 and .*, frozen on rank 1"
    ):
        GradientSynchronizer(model)


def test_modules_that_cannot_be(world):
    world(2).run(refused)


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
