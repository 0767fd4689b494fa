"""Pipeline parallelism: two stages, three schedules."""

import itertools

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from training import assert_gradients, batch, network

MICROBATCHES = 4


def stages_of(model, count):
    layers = list(model)
    cut = [round(len(layers) * n / count) for n in range(count + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cut)]


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def alone_with_loss():
    """The loss of a batch is the mean over its microbatches."""
    model = network()
    inputs, labels = batch(0, 0)
    parts = zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
    losses = [loss(model(x), y) for x, y in parts]
    (sum(losses) / MICROBATCHES).backward()
    return model, [one.item() for one in losses]


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=lambda s: s.__name__)
@on_ranks(2)
def test_two_stages(schedule):
    rank, size = dist.get_rank(), dist.get_world_size()
    stage_model = stages_of(network(), size)[rank]
    stage = PipelineStage(stage_model, rank, size, torch.device("cpu"))
    schedule = schedule(stage, MICROBATCHES, loss_fn=loss)
    inputs, labels = batch(0, 0)
    losses = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=labels, losses=losses)
    alone, expected = alone_with_loss()
    assert_gradients(stage_model, stages_of(alone, size)[rank], rtol=1e-9, atol=1e-12)
    if rank == size - 1:
        torch.testing.assert_close([one.item() for one in losses], expected)


@pytest.mark.full
@on_ranks(2)
def test_interleaved():
    """Four stages on two ranks: each rank has two of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    models = stages_of(network(), 2 * size)
    mine = [rank, rank + size]
    stages = [PipelineStage(models[n], n, 2 * size, torch.device("cpu")) for n in mine]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
    inputs, labels = batch(0, 0)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=labels, losses=[])
    alone, _ = alone_with_loss()
    for number in mine:
        assert_gradients(models[number], stages_of(alone, 2 * size)[number], rtol=1e-9, atol=1e-12)
