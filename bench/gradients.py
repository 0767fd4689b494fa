"""Models for gradient communication, which needs only the shapes of the parameters, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "EmulatedModel", "gpt2_medium", "mlp", "resnet50"]

Shape = tuple[int, ...]
_SIDE = 256  # of the matrices whose products emulate the arithmetic of a backward pass
_PRODUCT_FLOP = 2.0 * _SIDE**3


def resnet50() -> list[Shape]:
    """161 tensors, 25.6 M parameters."""

    def convolution(inputs: int, outputs: int, side: int) -> Iterator[Shape]:
        yield (outputs, inputs, side, side)
        yield (outputs,)  # the batch norm after it: weight and bias
        yield (outputs,)

    shapes = list(convolution(3, 64, 7))
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += convolution(inputs, width, 1)
            shapes += convolution(width, width, 3)
            shapes += convolution(width, 4 * width, 1)
            if block == 0:
                shapes += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def mlp() -> list[Shape]:
    """12 tensors, 25.2 M parameters: six layers of 2048 x 2048."""
    return [(2048, 2048), (2048,)] * 6


def gpt2_medium() -> list[Shape]:
    """292 tensors, 354.8 M parameters."""
    width = 1024
    norm: list[Shape] = [(width,), (width,)]

    def linear(inputs: int, outputs: int) -> list[Shape]:
        return [(inputs, outputs), (outputs,)]

    block = [
        *norm,
        *linear(width, 3 * width),
        *linear(width, width),
        *norm,
        *linear(width, 4 * width),
        *linear(4 * width, width),
    ]
    return [(50257, width), (1024, width), *block * 24, *norm]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "mlp": mlp,
    "gpt2-medium": gpt2_medium,
}


class _Layer(torch.autograd.Function):
    """Returns its input; the backward pass makes a gradient of the parameter by one pass over memory."""

    @staticmethod
    def forward(ctx, carry, parameter, value, factor, products):  # type: ignore[no-untyped-def]
        ctx.parameter, ctx.value, ctx.factor, ctx.products = parameter, value, factor, products
        return carry.view_as(carry)

    @staticmethod
    def backward(ctx, carry):  # type: ignore[no-untyped-def]
        for _ in range(ctx.products):
            ctx.factor @ ctx.factor
        return carry, torch.full_like(ctx.parameter, ctx.value), None, None, None


class EmulatedModel(nn.Module):
    """Parameters whose gradients become ready one after another, the last parameter's first.

    Args:
        shapes: Shapes of the parameters.
        memory: 1-D, at least as long as all parameters; models may share it, because no step changes it.
        value: Value of all elements of the gradients on this rank.
        gflop: Arithmetic of the backward pass in 1e9 operations, divided by the sizes of the parameters.
    """

    def __init__(
        self,
        shapes: Iterable[Shape],
        memory: Tensor,
        value: float,
        gflop: float,
    ) -> None:
        super().__init__()
        shapes = list(shapes)
        self.value = value
        self.factor = torch.zeros(_SIDE, _SIDE, dtype=memory.dtype, device=memory.device)
        self.start = torch.zeros(1, device=memory.device, requires_grad=True)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(memory[: sum(sizes)], sizes)
        self.weights = nn.ParameterList(
            nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)
        )
        self.products, done, before = [], 0, 0
        for size in sizes:
            before += size
            due = round(gflop * 1e9 / _PRODUCT_FLOP * before / sum(sizes))
            self.products.append(due - done)
            done = due

    def forward(self) -> Tensor:
        """Returns a scalar that depends on every parameter."""
        carry = self.start
        for parameter, products in zip(self.weights, self.products, strict=True):
            carry = _Layer.apply(carry, parameter, self.value, self.factor, products)  # type: ignore[no-untyped-call]
        return carry.sum()
