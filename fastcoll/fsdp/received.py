"""The sum of the parts that all ranks have sent to this one, in rank order and in float32.

    out[i] = in[0][i] + in[1][i] + ... + in[n-1][i]; AVG: then divided by n

On a GPU by one launch of kernels.Reduce. Bytes: n parts of the wire dtype read, one of float32 written. Where Triton
cannot be imported, and on the CPU, by a pass for each part, to the same bits: what a rank does here no other rank sees.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["has_kernels", "sum_by_kernel", "sum_by_torch", "sum_received"]

_log = logging.getLogger("fastcoll.fsdp")


@cache
def has_kernels() -> bool:
    """Tells whether kernels can be made here; if not, the log has why, once."""
    try:
        import triton  # noqa: F401  # fastcoll.kernels imports it with the first plan only
    except Exception as error:  # no Triton, or one that does not work here
        _log.warning(
            "fastcoll.fsdp: messages are summed by torch, a pass for each rank: Triton cannot be imported "
            "(%s: %s). pip install 'fastcoll[triton]'",
            type(error).__name__,
            error,
        )
        return False
    return True


def sum_received(parts: Tensor, output: Tensor, average: bool) -> None:
    """Sums parts.

    Args:
        parts: [ranks, elements], of the wire dtype.
        output: [elements], float32, on the same device.
        average: Whether to divide by the number of ranks.
    """
    by_kernel = parts.is_cuda and has_kernels()
    (sum_by_kernel if by_kernel else sum_by_torch)(parts, output, average)


def sum_by_torch(parts: Tensor, output: Tensor, average: bool) -> None:
    """As :func:`sum_received`, by a pass for each part."""
    output.copy_(parts[0])
    for part in parts[1:]:
        output += part
    if average:
        # By a tensor: a GPU would multiply by the reciprocal of a number.
        output /= torch.full((), float(len(parts)), device=output.device)


def sum_by_kernel(parts: Tensor, output: Tensor, average: bool) -> None:
    """As :func:`sum_received`, by one launch."""
    ranks, elements = parts.shape
    if elements == 0:
        return
    plan = _reduce_plan(elements, ranks, parts.dtype, output.dtype, output.device, average)
    plan(list(parts), output)


@lru_cache(maxsize=256)
def _reduce_plan(elements: int, ranks: int, wire, to, device, average) -> Any:  # type: ignore[no-untyped-def]
    from fastcoll.buckets import BucketLayout
    from fastcoll.kernels import Reduce

    layout = BucketLayout([elements])
    return Reduce(layout, ranks, wire, to, device, "AVG" if average else "SUM")
