"""Norm: the L2 norm of a step's gradients from sums of their squares, and what clipping in the optimizer's step needs.

    norm = sqrt(squares[0] + squares[1] + ...)
    divisor = max(1, (norm + 1e-6) / max_norm)
    found_inf = 1 if the sum is not finite, else 0

All in float64, by one program, so the order of the sum is the same on all ranks. Bytes: 8 for each sum of squares, and
16. A sum stands for at most 8192 elements. Bound: the latency of one program, which reads 8 KiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import factor_of
from fastcoll.kernels._configuration import (
    UNFUSED,
    Configuration,
    configuration_of,
    double_bits,
)
from fastcoll.kernels._dtypes import addressed
from fastcoll.kernels._launch import Launch, prepared

__all__ = ["configurations", "norm_kernel", "prepare_norm"]


@triton.jit
def norm_kernel(squares, count, result, max_norm_bits, epsilon_bits, BLOCK: tl.constexpr):
    """Writes the norm as float64 to the address `result`, and behind it divisor and found_inf as float32."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count.to(tl.int64), BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(addressed(squares, tl.float64) + at, mask=at < count, other=0.0)
    square = tl.sum(total)
    norm = tl.sqrt(square)
    epsilon = factor_of(epsilon_bits, tl.float64)
    ratio = (norm + epsilon) / factor_of(max_norm_bits, tl.float64)
    tl.store(addressed(result, tl.float64), norm)
    numbers = addressed(result, tl.float32) + 2
    tl.store(numbers, tl.where(ratio < 1.0, 1.0, ratio).to(tl.float32))
    found_inf = tl.where(square < float("inf"), 0.0, 1.0)  # NaN is not less
    tl.store(numbers + 1, found_inf.to(tl.float32))


_CONFIGURATION = configuration_of("norm", norm_kernel, wide=False, options=UNFUSED, BLOCK=1024)


def configurations() -> Iterator[Configuration]:
    """Yields the configuration that ``prepare_norm`` launches."""
    yield _CONFIGURATION


def prepare_norm(
    squares: int, count: int, result: int, max_norm: float, epsilon: float, device: torch.device
) -> Launch:
    """Returns a launch that can be repeated.

    Args:
        squares: Address of the sums of squares: float64 [count].
        count: Number of the sums.
        result: Address of 16 bytes.
        max_norm: The largest norm, above 0; may be infinite.
        epsilon: Is added to the norm that is divided by ``max_norm``.
        device: Device of the memory.

    Raises:
        ValueError: Kernels cannot run on that device.
    """
    arguments = (squares, count, result, double_bits(max_norm), double_bits(epsilon))
    return prepared(_CONFIGURATION, device, 1, arguments)
