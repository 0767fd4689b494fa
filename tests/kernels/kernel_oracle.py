"""What the kernels must give, to the bit (NaN apart): the same arithmetic in plain PyTorch, on CPU or GPU.

By the same tree, in the same accumulate dtype, with one rounding at the end. Those between ranks have all messages at
hand here. No Triton is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from oracle import folded
from torch import Tensor

from fastcoll.buckets import BucketLayout

_GRAIN = 16


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _factor(scale: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(scale, dtype=torch.float64).to(dtype)


def flatten(
    tensors: Sequence[Tensor], layout: BucketLayout, wire_dtype: torch.dtype, scale: float = 1.0
) -> list[Tensor]:
    """Returns the bucket's part for each tensor: 1-D, of `wire_dtype`. Gaps are not part of the result."""
    assert layout.sizes == tuple(tensor.numel() for tensor in tensors)
    wide = [_wide(tensor.dtype) for tensor in tensors]
    return [
        (tensor.to(dtype) * _factor(scale, dtype)).to(wire_dtype)
        for tensor, dtype in zip(tensors, wide, strict=True)
    ]


def unflatten(
    bucket: Tensor, layout: BucketLayout, dtype: torch.dtype, scale: float = 1.0
) -> list[Tensor]:
    """Returns what becomes of the elements of each tensor: 1-D, of `dtype`."""
    wide = _wide(bucket.dtype)
    return [(part.to(wide) * _factor(scale, wide)).to(dtype) for part in layout.views(bucket)]


def all_reduce(
    messages: Sequence[Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "one_shot",
) -> Tensor:
    """Returns what every rank gets, and what is reduced of the buffers of one device.

    Args:
        messages: One of each rank: equal shapes, one floating-point dtype; flat for the ring.
        op: "sum" or "avg".
        scale: Factor of the result.
        wire_dtype: Dtype that the result is rounded to, or None for that of the messages. Messages are rounded to it
            too, but for the ring.
        algorithm: "ring" reduces chunk q from rank q + 1 round to rank q; all others by the tree of the CPU.
    """
    if algorithm == "ring":
        # The last chunks may be shorter, or empty.
        chunk = -(-messages[0].numel() // (len(messages) * _GRAIN)) * _GRAIN
        return _ring(messages, chunk, op, scale, wire_dtype)
    wire = wire_dtype or messages[0].dtype
    rounded = [each.to(wire) for each in messages]
    return _finished(folded, rounded, op, scale, None).to(messages[0].dtype)


def ring_reduce_scatter(
    messages: Sequence[Tensor],
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Returns the chunk of each rank; sizes are multiples of the number of ranks."""
    chunk = messages[0].numel() // len(messages)
    result = _ring(messages, chunk, op, scale, wire_dtype)
    return list(result.split(chunk)) if chunk else [result for _ in messages]


def _ring(
    messages: Sequence[Tensor], chunk: int, op: str, scale: float, wire_dtype: torch.dtype | None
) -> Tensor:
    ranks = len(messages)
    chunks = []
    for owner in range(ranks):
        pieces = [message[owner * chunk : (owner + 1) * chunk] for message in messages]
        in_order = [pieces[(owner + 1 + step) % ranks] for step in range(ranks)]
        chunks.append(_finished(_in_order, in_order, op, scale, wire_dtype))
    return torch.cat(chunks)


def _in_order(values: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return functools.reduce(combine, values)


def _finished(
    total: Callable[[Sequence[Tensor], Callable[[Tensor, Tensor], Tensor]], Tensor],
    messages: Sequence[Tensor],
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
) -> Tensor:
    dtype = messages[0].dtype
    wide = _wide(dtype)
    value = total([message.to(wide) for message in messages], torch.add) * _factor(scale, wide)
    if op == "avg":
        # By a tensor of the device: by a number PyTorch multiplies by the reciprocal there.
        value = value / torch.full_like(value, len(messages))
    return value.to(wire_dtype or dtype).to(dtype)
