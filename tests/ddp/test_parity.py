"""Small models trained by fastcoll and by gloo: the same bits in float32, within noise with a bfloat16 wire.

On two ranks a sum has one order, and halves are exact. On more ranks gloo sums in another order. What a bfloat16
wire may change is measured: the *noise* is the standard deviation that the order of the data alone makes in the
loss on a fixed held-out set, on gloo. The wire must move that loss by less, on average over the run.
"""

import statistics
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from on_ranks import on_ranks
from torch import nn
from ways import hooked, stock, synchronized

pytestmark = [pytest.mark.full, beyond_gloo("the hook's average in the all-reduce")]

STEPS = 30
ORDERS = 3  # of the data, on gloo
BATCH, HELD_OUT = 16, 96
CLASSES, SIDE = 10, 12
WORDS, LENGTH, WIDTH = 32, 24, 64
BUCKET_MB = 0.1


class Block(nn.Module):
    """Two convolutions and a residual, as in ResNet."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, images):
        return torch.relu(self.body(images) + self.short(images))


def resnet():
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def images(count, generator):
    """Noisy copies of ten fixed images, some of them mirrored."""
    fixed = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, 3, SIDE // 4, SIDE // 4, generator=fixed)
    patterns = nn.functional.interpolate(patterns, scale_factor=4, mode="bilinear")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    mirrored = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    inputs = torch.where(mirrored, patterns[labels].flip(3), patterns[labels])
    return inputs + 2.0 * torch.randn(inputs.shape, generator=generator), labels


class Transformer(nn.Module):
    """Predicts the next word: two layers of causal attention."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words):
        hidden = self.layers(self.words(words) + self.places, mask=self.mask)
        return self.head(hidden).transpose(1, 2)


def sentences(count, generator):
    """Walks of a fixed Markov chain, and the same walks one word on."""
    fixed = torch.Generator().manual_seed(2)
    chances = torch.randn(WORDS, WORDS, generator=fixed).mul(2.5).softmax(1)
    walk = [torch.randint(WORDS, (count,), generator=generator)]
    for _ in range(LENGTH):
        walk.append(torch.multinomial(chances[walk[-1]], 1, generator=generator)[:, 0])
    words = torch.stack(walk, 1)
    return words[:, :-1], words[:, 1:]


TASKS = {"resnet-like": (resnet, images, 0.05), "transformer": (Transformer, sentences, 0.03)}


class Course(NamedTuple):
    """What a rank saw of a training: losses of its batches, and on the held-out set; all weights at the end."""

    losses: list
    held_out: list
    weights: list

    @property
    def learnt(self):
        tenth = STEPS // 10
        return statistics.mean(self.losses[-tenth:]) < 0.9 * statistics.mean(self.losses[:tenth])


def train(name, wrap, group=None, order=0, **options):
    """Trains on data of this rank's own; the model's start is always the same."""
    build, sample, learning_rate = TASKS[name]
    torch.manual_seed(0)
    model = build()
    ddp, _ = wrap(model, group, bucket_cap_mb=BUCKET_MB, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    data = torch.Generator().manual_seed(1000 + 100 * order + dist.get_rank())
    fixed = sample(HELD_OUT, torch.Generator().manual_seed(999))
    losses, held_out = [], []
    for step in range(STEPS):
        inputs, labels = sample(BATCH, data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            model.eval()
            with torch.no_grad():
                held_out.append(nn.functional.cross_entropy(model(fixed[0]), fixed[1]).item())
            model.train()
    return Course(losses, held_out, [weight.tolist() for weight in model.parameters()])


def compared(name):
    gloo = dist.new_group(backend="gloo")
    orders = [train(name, stock, gloo, order) for order in range(ORDERS)]
    dist.destroy_process_group(gloo)
    first = orders[0]
    assert first.learnt, "nothing was learnt, so that nothing is compared"
    assert train(name, hooked) == first
    assert train(name, synchronized) == first
    narrow = train(name, hooked, wire_dtype=torch.bfloat16)
    assert narrow.weights != first.weights, "the bfloat16 wire was not used"
    points = zip(*(course.held_out for course in orders), strict=True)
    noise = statistics.mean(map(statistics.stdev, points))
    apart = zip(narrow.held_out, first.held_out, strict=True)
    assert statistics.mean(abs(a - b) for a, b in apart) < noise
    return first.losses


@pytest.mark.parametrize("name", list(TASKS))
def test_training_is_gloos(world, name):
    losses = world(2).run(compared, name)
    assert losses[0] != losses[1]  # the ranks have data of their own


@on_ranks(1)
def test_one_rank():
    """One rank: nothing is summed, and the average of one is itself."""
    gloo = dist.new_group(backend="gloo")
    first = train("resnet-like", stock, gloo)
    dist.destroy_process_group(gloo)
    for wrap in (hooked, synchronized):
        assert train("resnet-like", wrap) == first
