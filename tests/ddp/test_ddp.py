"""Stock DistributedDataParallel, and fastcoll's two ways, against one process with all the data."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    Branches,
    assert_like,
    assert_replicated,
    assert_same,
    batch,
    loss_by_turns,
    network,
    train,
    train_alone,
)
from ways import ALL_WAYS

STEPS = 5
MANY_BUCKETS = {"bucket_cap_mb": 0.001}
OPTIONS = {
    "plain": {},
    "many_buckets": MANY_BUCKETS,
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True, **MANY_BUCKETS},
    "find_unused_parameters": {"find_unused_parameters": True, **MANY_BUCKETS},
    "no_buffer_broadcast": {"broadcast_buffers": False},
}
if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
    OPTIONS["batched_grad_copy"] = {"batched_grad_copy": True}

each_way = pytest.mark.parametrize("way", ALL_WAYS)


@pytest.mark.parametrize(
    ("size", "way", "name"),
    [
        *((3, "stock", name) for name in OPTIONS if name != "many_buckets"),
        *((size, way, "many_buckets") for size in (1, 3) for way in ALL_WAYS),
    ],
)
@on_ranks()
def test_options_and_world_sizes(way, name):
    model = network()
    losses = train(ALL_WAYS[way](model, **OPTIONS[name])[0], STEPS)
    assert_like(model, train_alone(STEPS, dist.get_world_size()))
    assert_replicated(model)
    assert losses[-1] < losses[0]


@each_way
@on_ranks(3)
def test_start_from_rank_zero(way):
    """Rank 0's weights and buffers are handed to the others."""
    model = nn.Sequential(network(), nn.BatchNorm1d(5).double())
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(dist.get_rank())
    called, _ = ALL_WAYS[way](model)
    assert_same(model[0], network())
    assert model[1].running_mean.sum() == 0
    called(batch(dist.get_rank(), 0)[0]).sum().backward()
    called(batch(dist.get_rank(), 1)[0])  # broadcasts the buffers first
    assert model[1].num_batches_tracked == 2
    assert_replicated(model)


@each_way
@on_ranks(2)
def test_unused_parameters(way):
    """Every rank goes through another head; the third is used by nobody, and does not decay."""
    decaying = functools.partial(torch.optim.SGD, lr=0.2, weight_decay=0.5)
    model = Branches()
    called, _ = ALL_WAYS[way](model, **OPTIONS["find_unused_parameters"])
    train(called, STEPS, decaying(model.parameters()), loss_by_turns)
    assert model.heads[2].weight.grad is None
    assert_like(model, train_alone(STEPS, 2, decaying, Branches(), loss_by_turns))
    assert_replicated(model)


@each_way
@on_ranks(4, fresh=True)
def test_replicas_in_subgroups(way):
    """Two replicas of two ranks each, side by side; each starts as its first rank does."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    team, place = divmod(dist.get_rank(), 2)
    model = network()
    with torch.no_grad():
        model[0].weight.add_(place)
    train(ALL_WAYS[way](model, groups[team])[0], STEPS)
    assert_like(model, train_alone(STEPS, (2 * team, 2 * team + 1)))
