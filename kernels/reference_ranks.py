"""What the kernels between ranks must give, to the bit: the same arithmetic in PyTorch, with all messages at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "all_gather",
    "all_reduce",
    "ring_all_reduce",
    "ring_chunk",
    "ring_reduce_scatter",
]

_GRAIN = 16


def all_reduce(
    messages: Sequence[torch.Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns what one_shot and two_shot give every rank.

    Args:
        messages: One of each rank: equal shapes, one floating-point dtype.
        op: "sum", "avg", "min", "max" or "product".
        scale: Factor of the result.
        wire_dtype: Dtype that messages and result are rounded to, or None for that of the messages.
    """
    return _in_order(messages, range(len(messages)), op, scale, wire_dtype, None)


def all_gather(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what every rank gets."""
    return torch.cat(list(chunks))


def ring_all_reduce(
    messages: Sequence[torch.Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
) -> torch.Tensor:
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
        ring_chunk(messages[0].numel(), len(messages)),
        op,
        scale,
        wire_dtype,
        partial_dtype,
    )


def ring_reduce_scatter(
    messages: Sequence[torch.Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Returns the chunk of each rank; sizes are multiples of the number of ranks."""
    chunk = messages[0].numel() // len(messages)
    result = _ring(messages, chunk, op, scale, wire_dtype, partial_dtype)
    return list(result.split(chunk)) if chunk else [result for _ in messages]


def ring_chunk(count: int, ranks: int) -> int:
    """Returns the elements of a chunk of the ring all-reduce; the last chunks may be shorter or empty."""
    return -(-count // (ranks * _GRAIN)) * _GRAIN


def _ring(
    messages: Sequence[torch.Tensor],
    chunk: int,
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
    partial_dtype: torch.dtype | None,
) -> torch.Tensor:
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
    messages: Sequence[torch.Tensor],
    order: Sequence[int],
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
    partial_dtype: torch.dtype | None,
) -> torch.Tensor:
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


def _combined(first: torch.Tensor, second: torch.Tensor, op: str) -> torch.Tensor:
    if op in ("sum", "avg"):
        return first + second
    if op == "product":
        return first * second
    return torch.minimum(first, second) if op == "min" else torch.maximum(first, second)
