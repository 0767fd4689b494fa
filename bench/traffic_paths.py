"""Ways to average gradients, and what training does with the average: for ``fastcoll.bench.traffic`` to count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fastcoll.bench.attachments import STOCK_WAYS, Attached, clipped_in_step, hooked, synchronized

__all__ = ["GRADIENT_PATHS", "GradientPath"]

_BF16 = torch.bfloat16


@dataclass(frozen=True)
class GradientPath:
    """A way to average gradients.

    Attributes:
        name: What a user would call it.
        why: Where the bytes come from, S for those of all gradients.
        attach: Makes a model train so.
        kept: Whether gradients are zeroed before the step, and not set to None.
        fusing: Whether the backend has fastcoll's collective for gradients; so on CPU.
    """

    name: str
    why: str
    attach: Callable[[nn.Module], Attached]
    kept: bool = False
    fusing: bool = False


_IN = "each gradient is read, scaled and written to its bucket, 2 S in P launches"
_OUT = "the buckets are read and written to the gradients, 2 S in P"
_PLAIN_IN = "DDP copies each gradient into its bucket, 2 S in P launches"
_NARROW = "a bucket is read and written as bfloat16, 1.5 S, and back, 1.5 S"
_BATCHED = "a bucket's gradients are copied at once, 2 S, and the bucket divided, 2 S"
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_BATCHED_OUT = "the buckets are copied back at once, 2 S" if _TORCH >= (2, 15) else _OUT


def _stock(name: str, why: str) -> list[GradientPath]:
    """Returns one of torch's own, if this torch has it."""
    return [GradientPath(name, why, STOCK_WAYS[name])] if name in STOCK_WAYS else []


_VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
_viewed = partial(hooked, **_VIEWS)
_narrow = partial(_viewed, wire=_BF16)
_narrow_synchronized = partial(synchronized, wire_dtype=_BF16)

GRADIENT_PATHS = [
    *_stock("stock DDP", f"{_IN}; {_OUT}"),
    *_stock("stock DDP, bucket views", _IN),
    *_stock("stock DDP, batched_grad_copy", f"{_BATCHED}; {_BATCHED_OUT}"),
    *_stock("stock DDP, batched_grad_copy, bucket views", _BATCHED),
    *_stock(
        "bf16_compress_hook",
        f"{_PLAIN_IN}, and out, 2 S in P; {_NARROW}; the bfloat16 bucket is divided, S",
    ),
    *_stock(
        "bf16_compress_hook, bucket views",
        f"{_PLAIN_IN}; {_NARROW}; the bfloat16 bucket is divided, S",
    ),
    GradientPath(
        "fused hook",
        f"{_PLAIN_IN}, and out, 2 S in P; the average is part of the collective",
        hooked,
    ),
    GradientPath("fused hook, bucket views", f"{_PLAIN_IN}", _viewed),
    GradientPath(
        "fused hook, bucket views, gradients kept",
        "autograd adds into the bucket: nothing to copy. (zero_grad(set_to_none=False) writes S and the addition moves "
        "3 S, with or without DDP)",
        _viewed,
        kept=True,
    ),
    GradientPath(
        "fused hook, bf16 wire, bucket views; CPU",
        f"{_PLAIN_IN}; the cast is part of the collective",
        _narrow,
        fusing=True,
    ),
    GradientPath(
        "fused hook, bf16 wire, bucket views; device",
        f"{_PLAIN_IN}; {_NARROW}",
        _narrow,
    ),
    GradientPath(
        "GradientSynchronizer; CPU",
        "the collective reads and writes the gradients where they are",
        synchronized,
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer, bf16 wire; CPU",
        "the same; the cast is part of the collective",
        _narrow_synchronized,
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer; device",
        "a bucket's gradients are copied at once, 2 S, and back at once, 2 S",
        synchronized,
    ),
    GradientPath(
        "GradientSynchronizer, bf16 wire; device",
        f"the same, 4 S; {_NARROW}",
        _narrow_synchronized,
    ),
    *_stock(
        "stock DDP, bucket views; clip_grad_norm_",
        f"{_IN}; the norm reads S, the scaling 2 S",
    ),
    *_stock(
        "stock DDP, bucket views; AMP's unscale_ and clip_grad_norm_",
        f"{_IN}; unscaling 2 S, the norm S, the scaling 2 S",
    ),
    GradientPath(
        "GradientSynchronizer, clip_in_step; CPU",
        "the norm is taken in the collective, the factor in the optimizer's step",
        clipped_in_step,
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer, clip_in_step; device",
        "copies in and out, 4 S; each rank measures its share, S / n",
        clipped_in_step,
    ),
]
"""What is counted. Bucket views: ``gradient_as_bucket_view=True``. Gradients are None before a step, unless kept."""
