"""GradientSynchronizer and modules: replaced, copied, refused and freed ones; dtypes."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from training import assert_gradients, backward_alone

from fastcoll.ddp import GradientSynchronizer

pytestmark = on_ranks(2)


def inputs_of(rank):
    return torch.full((2, 4), 1.0 + rank)


@pytest.mark.parametrize("part", ["whole", "part"])
def test_parameters_that_were_replaced(part):
    """Other parameters in the place of those that are reduced: no gradient may stay unreduced in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    synchronizer = GradientSynchronizer(model)
    inputs = inputs_of(dist.get_rank())
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
    backward_alone(alone, 2, loss_of=lambda model, rank, _: model(inputs_of(rank)).square().sum())
    assert_gradients(model, alone)


def test_values_for_a_call_and_pruning():
    """torch.func's values for a call are nobody's parameters, and pruned ones have another name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    GradientSynchronizer(model)
    inputs = inputs_of(dist.get_rank())
    values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, values, inputs).sum().backward()
    assert values["0.weight"].grad is not None and model[0].weight.grad is None
    prune.identity(model[0], "weight")
    model(inputs).sum().backward()
    reduced = model[0].weight_orig.grad.clone()
    dist.all_reduce(reduced)
    assert torch.equal(reduced, 2 * model[0].weight_orig.grad)


def test_a_change_of_dtype():
    """Part of the module changes its dtype: buckets follow."""

    def loss(model, rank, step):
        return model[1](model[0](inputs_of(rank)).to(model[1].weight.dtype)).sum()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    GradientSynchronizer(model)
    loss(model, dist.get_rank(), 0).backward()
    model.zero_grad()
    model[1].double()
    loss(model, dist.get_rank(), 0).backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    backward_alone(alone, 2, loss_of=loss)
    assert_gradients(model, alone)


def test_freed():
    """A module that nobody holds is gone with its synchronizer."""
    model = nn.Linear(4, 4)
    synchronizer = GradientSynchronizer(model)
    model(torch.ones(2, 4)).sum().backward()
    left = [weakref.ref(model), weakref.ref(synchronizer)]
    del model, synchronizer
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_refused():
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
    with pytest.raises(ValueError, match="expected bucket_cap_mb above 0, got 0"):
        GradientSynchronizer(nn.Linear(1, 1), bucket_cap_mb=0)
    with pytest.raises(RuntimeError, match=r"weight of \(4, 3\).*on rank 0 and weight of \(5, 3\)"):
        GradientSynchronizer(nn.Linear(3, 4 + dist.get_rank()))
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(
        RuntimeError, match=r"weight of \(2, 2\) torch\.float32 on rank 0 and .*, frozen on rank 1"
    ):
        GradientSynchronizer(model)


def test_copied():
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


@on_ranks(1)
def test_sparse():
    model = nn.Embedding(10, 3, sparse=True)
    GradientSynchronizer(model)
    with pytest.raises(
        TypeError, match=r"expected dense gradients, got one of layout torch\.sparse_coo of weight"
    ):
        model(torch.tensor([1, 2])).sum().backward()
