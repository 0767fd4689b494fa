"""What the kernels must give, to the bit (NaN apart): the same arithmetic in plain PyTorch, on CPU or GPU.

In the same order, in the same accumulate dtype, with one rounding at the end. Those between ranks have all messages at
hand here. No Triton is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcoll.buckets import BucketLayout

__all__ = [
    "all_gather",
    "all_reduce",
    "elements_of",
    "flatten",
    "reduce",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "statistics",
    "unflatten",
]

_GRAIN = 16


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _factor(scale: float | Tensor, dtype: torch.dtype) -> Tensor | float:
    if isinstance(scale, Tensor):
        return scale.to(dtype)
    return torch.tensor(scale, dtype=torch.float64).to(dtype)


def elements_of(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's elements in the order in which they lie in memory: a 1-D view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten(
    tensors: Sequence[Tensor],
    layout: BucketLayout,
    wire_dtype: torch.dtype,
    scale: float | Tensor = 1.0,
) -> list[Tensor]:
    """Returns the bucket's part for each tensor: 1-D, of `wire_dtype`. Gaps are not part of the result."""
    assert layout.sizes == tuple(tensor.numel() for tensor in tensors)
    wide = [_wide(tensor.dtype) for tensor in tensors]
    return [
        (elements_of(tensor).to(dtype) * _factor(scale, dtype)).to(wire_dtype)
        for tensor, dtype in zip(tensors, wide, strict=True)
    ]


def unflatten(
    bucket: Tensor,
    layout: BucketLayout,
    tensors: Sequence[Tensor],
    scale: float | Tensor = 1.0,
    accumulate: bool = False,
) -> list[Tensor]:
    """Returns what becomes of the elements of each tensor: 1-D, of its dtype."""
    wide = _wide(bucket.dtype)
    results = []
    for tensor, part in zip(tensors, layout.views(bucket), strict=True):
        values = part.to(wide) * _factor(scale, wide)
        if accumulate:
            values = values + elements_of(tensor).to(wide)
        results.append(values.to(tensor.dtype))
    return results


def reduce(
    inputs: Sequence[Tensor],
    op: str = "SUM",
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Return the sum, or AVG the mean, of tensors of one shape and dtype."""
    wide = _wide(inputs[0].dtype)
    total = inputs[0].to(wide)
    for tensor in inputs[1:]:
        total = total + tensor.to(wide)
    total = total * _factor(scale, wide)
    if (
        op == "AVG"
    ):  # by a tensor of the device: by a number PyTorch multiplies by the reciprocal there
        total = total / torch.full_like(total, len(inputs))
    return total.to(inputs[0].dtype)


def statistics(values: Sequence[Tensor], stored: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the sum of squares of `values`, in float64, and 1.0 if one of either list is not finite."""
    squares = sum(float(value.double().square().sum()) for value in values)
    finite = all(bool(part.float().isfinite().all()) for part in (*values, *stored))
    return squares, 0.0 if finite else 1.0


def all_reduce(
    messages: Sequence[Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns what one_shot and two_shot give every rank.

    Args:
        messages: One of each rank: equal shapes, one floating-point dtype.
        op: "sum", "avg", "min", "max" or "product".
        scale: Factor of the result.
        wire_dtype: Dtype that messages and result are rounded to, or None for that of the messages.
    """
    return _in_order(messages, range(len(messages)), op, scale, wire_dtype, None)


def all_gather(chunks: Sequence[Tensor]) -> Tensor:
    """Returns what every rank gets."""
    return torch.cat(list(chunks))


def ring_all_reduce(
    messages: Sequence[Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns what the ring gives every rank: chunk q is reduced from rank q + 1 round to rank q.

    Args:
        messages: One of each rank: flat, of one floating-point dtype.
        op: As for :func:`all_reduce`.
        scale: As for :func:`all_reduce`.
        wire_dtype: Dtype that the result is rounded to; messages are not.
        partial_dtype: Dtype that each partial result is rounded to; None for the wire dtype.
    """
    return _ring(
        messages,
        _ring_chunk(messages[0].numel(), len(messages)),
        op,
        scale,
        wire_dtype,
        partial_dtype,
    )


def ring_reduce_scatter(
    messages: Sequence[Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Returns the chunk of each rank; sizes are multiples of the number of ranks."""
    chunk = messages[0].numel() // len(messages)
    result = _ring(messages, chunk, op, scale, wire_dtype, partial_dtype)
    return list(result.split(chunk)) if chunk else [result for _ in messages]


def _ring_chunk(count: int, ranks: int) -> int:
    """Returns the elements of a chunk of the ring all-reduce; the last chunks may be shorter or empty."""
    return -(-count // (ranks * _GRAIN)) * _GRAIN


def _ring(
    messages: Sequence[Tensor],
    chunk: int,
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    ranks = len(messages)
    wire = messages[0].dtype if wire_dtype is None else wire_dtype
    partial = wire if partial_dtype is None else partial_dtype
    chunks = []
    for owner in range(ranks):
        order = [(owner + 1 + step) % ranks for step in range(ranks)]
        pieces = [message[owner * chunk : (owner + 1) * chunk] for message in messages]
        chunks.append(_in_order(pieces, order, op, scale, wire, partial))
    return torch.cat(chunks)


def _in_order(
    messages: Sequence[Tensor],
    order: Sequence[int],
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """Reduces in the given order; rounds what travels: messages to the wire, or else partials to their dtype."""
    dtype = messages[0].dtype
    wire = dtype if wire_dtype is None else wire_dtype
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    sources = [message.to(wire) if partial_dtype is None else message for message in messages]
    value = sources[order[0]].to(accumulate)
    for rank in order[1:]:
        if partial_dtype is not None:
            value = value.to(partial_dtype).to(accumulate)
        value = _combined(value, sources[rank].to(accumulate), op)
    value = value * torch.tensor(scale, dtype=torch.float64).to(accumulate)
    if (
        op == "avg"
    ):  # by a tensor of the device: by a number PyTorch multiplies by the reciprocal there
        value = value / torch.full_like(value, len(messages))
    return value.to(wire).to(dtype)


def _combined(first: Tensor, second: Tensor, op: str) -> Tensor:
    if op in ("sum", "avg"):
        return first + second
    if op == "product":
        return first * second
    return torch.minimum(first, second) if op == "min" else torch.maximum(first, second)
