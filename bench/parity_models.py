"""Two small models with data that can be learnt, to compare trainings: convolutions with batch norm, and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["TASKS", "Task"]

_CLASSES = 10
_SIDE = 12
_WORDS = 32
_LENGTH = 24


class _Block(nn.Module):
    """Two convolutions and a residual, as in ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
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

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.short(images))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        _Block(16, 16, 1),
        _Block(16, 32, 2),
        _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, _CLASSES),
    )


def _images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed images, some of them mirrored."""
    fixed = torch.Generator().manual_seed(1)
    patterns = torch.randn(_CLASSES, 3, _SIDE // 4, _SIDE // 4, generator=fixed)
    patterns = nn.functional.interpolate(patterns, scale_factor=4, mode="bilinear")
    labels = torch.randint(_CLASSES, (count,), generator=generator)
    mirrored = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    images = patterns[labels]
    images = torch.where(mirrored, images.flip(3), images)
    return images + 2.0 * torch.randn(images.shape, generator=generator), labels


class _Transformer(nn.Module):
    """Predicts the next word: two layers of causal attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(_LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, _WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.layers(self.words(words) + self.places, mask=self.mask)
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def _sentences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns walks of a fixed Markov chain, and the same walks one word on."""
    fixed = torch.Generator().manual_seed(2)
    chances = torch.randn(_WORDS, _WORDS, generator=fixed).mul(2.5).softmax(1)
    walk = [torch.randint(_WORDS, (count,), generator=generator)]
    for _ in range(_LENGTH):
        walk.append(torch.multinomial(chances[walk[-1]], 1, generator=generator)[:, 0])
    words = torch.stack(walk, 1)
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        build: Makes the model with torch's current random numbers.
        sample: Draws that many inputs and labels for ``cross_entropy``.
        batch: Inputs of a rank in a step.
        learning_rate: Of SGD with a momentum of 0.9.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    batch: int
    learning_rate: float


TASKS = {
    "resnet-like": Task(_resnet, _images, 16, 0.05),
    "transformer": Task(_Transformer, _sentences, 16, 0.03),
}
"""By name."""
