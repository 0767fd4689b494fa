"""Pipeline parallelism: two ranks with one stage or two each, three schedules."""

import itertools

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from suite_rules import full
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


@pytest.mark.parametrize(
    ("schedule", "each"),
    [(ScheduleGPipe, 1), (Schedule1F1B, 1), full(ScheduleInterleaved1F1B, 2)],
    ids=lambda value: getattr(value, "__name__", f"{value} a rank"),
)
@on_ranks(2)
def test_stages(schedule, each):
    """Each rank has so many stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    models, mine = stages_of(network(), each * size), range(rank, each * size, size)
    stages = [PipelineStage(models[n], n, each * size, torch.device("cpu")) for n in mine]
    schedule = schedule(stages if each > 1 else stages[0], MICROBATCHES, loss_fn=loss)
    inputs, labels = batch(0, 0)
    losses = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=labels, losses=losses)
    alone, expected = alone_with_loss()
    for number in mine:
        parts = models[number], stages_of(alone, each * size)[number]
        assert_gradients(*parts, rtol=1e-9, atol=1e-12)
    if rank == size - 1:
        torch.testing.assert_close([one.item() for one in losses], expected)
