"""What the kernels of flatten.py, unflatten.py and reduce.py compute, in plain PyTorch on CPU or GPU.

Bit for bit the same, NaN apart: the same order, the same accumulate dtype, one rounding at the end. No
Triton is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcoll.buckets import BucketLayout

__all__ = ["elements_of", "flatten", "reduce", "statistics", "unflatten"]


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
