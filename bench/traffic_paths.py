"""Ways to average gradients, and what training does with the average: for ``fastcoll.bench.traffic`` to count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

__all__ = ["GRADIENT_PATHS", "Attached", "GradientPath"]

_BF16 = torch.bfloat16


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Attached:
    """A model that is ready to train.

    Attributes:
        module: What is called for the loss.
        after: What follows the backward pass.
    """

    module: nn.Module
    after: Callable[[], Any] = _nothing


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


def _stock(**options: Any) -> Callable[[nn.Module], Attached]:
    return lambda model: Attached(DistributedDataParallel(model, **options))


def _bf16_compress(**options: Any) -> Callable[[nn.Module], Attached]:
    def attach(model: nn.Module) -> Attached:
        ddp = DistributedDataParallel(model, **options)
        # DDP refuses the hook itself on CPU, by its name, and looks at annotations.
        ddp.register_comm_hook(
            None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        )
        return Attached(ddp)

    return attach


def _hooked(views: bool, wire: torch.dtype | None = None) -> Callable[[nn.Module], Attached]:
    def attach(model: nn.Module) -> Attached:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        ddp.register_comm_hook(FusedAllreduceState(wire_dtype=wire), fused_allreduce_hook)
        return Attached(ddp)

    return attach


def _synchronized(wire: torch.dtype | None = None) -> Callable[[nn.Module], Attached]:
    def attach(model: nn.Module) -> Attached:
        GradientSynchronizer(model, wire_dtype=wire)
        return Attached(model)

    return attach


def _clipped(model: nn.Module) -> Attached:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Attached(ddp, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def _unscaled_and_clipped(model: nn.Module) -> Attached:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def after() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(1))
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return Attached(ddp, after)


def _clipped_in_step(model: nn.Module) -> Attached:
    synchronizer = GradientSynchronizer(model, gradient_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return Attached(model, lambda: synchronizer.clip_in_step(optimizer, 1.0))


_IN = "each gradient is read, scaled and written to its bucket, 2 S in P launches"
_OUT = "the buckets are read and written to the gradients, 2 S in P"
_PLAIN_IN = "DDP copies each gradient into its bucket, 2 S in P launches"
_NARROW = "a bucket is read and written as bfloat16, 1.5 S, and back, 1.5 S"

_BATCHED = [
    GradientPath(
        "stock DDP, batched_grad_copy",
        f"a bucket's gradients are copied at once, 2 S, and the bucket divided, 2 S; {_OUT}",
        _stock(batched_grad_copy=True),
    ),
    GradientPath(
        "stock DDP, batched_grad_copy, bucket views",
        "a bucket's gradients are copied at once, 2 S, and the bucket divided, 2 S",
        _stock(batched_grad_copy=True, gradient_as_bucket_view=True),
    ),
]

GRADIENT_PATHS = [
    GradientPath("stock DDP", f"{_IN}; {_OUT}", _stock()),
    GradientPath("stock DDP, bucket views", _IN, _stock(gradient_as_bucket_view=True)),
    *(
        _BATCHED
        if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters
        else []
    ),
    GradientPath(
        "bf16_compress_hook",
        f"{_PLAIN_IN}, and out, 2 S in P; {_NARROW}; the bfloat16 bucket is divided, S",
        _bf16_compress(),
    ),
    GradientPath(
        "bf16_compress_hook, bucket views",
        f"{_PLAIN_IN}; {_NARROW}; the bfloat16 bucket is divided, S",
        _bf16_compress(gradient_as_bucket_view=True),
    ),
    GradientPath(
        "fused hook",
        f"{_PLAIN_IN}, and out, 2 S in P; the average is part of the collective",
        _hooked(False),
    ),
    GradientPath("fused hook, bucket views", f"{_PLAIN_IN}", _hooked(True)),
    GradientPath(
        "fused hook, bucket views, gradients kept",
        "autograd adds into the bucket: nothing to copy. (zero_grad(set_to_none=False) writes S and the addition moves "
        "3 S, with or without DDP)",
        _hooked(True),
        kept=True,
    ),
    GradientPath(
        "fused hook, bf16 wire, bucket views; CPU",
        f"{_PLAIN_IN}; the cast is part of the collective",
        _hooked(True, _BF16),
        fusing=True,
    ),
    GradientPath(
        "fused hook, bf16 wire, bucket views; device",
        f"{_PLAIN_IN}; {_NARROW}",
        _hooked(True, _BF16),
    ),
    GradientPath(
        "GradientSynchronizer; CPU",
        "the collective reads and writes the gradients where they are",
        _synchronized(),
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer, bf16 wire; CPU",
        "the same; the cast is part of the collective",
        _synchronized(_BF16),
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer; device",
        "a bucket's gradients are copied at once, 2 S, and back at once, 2 S",
        _synchronized(),
    ),
    GradientPath(
        "GradientSynchronizer, bf16 wire; device",
        f"the same, 4 S; {_NARROW}",
        _synchronized(_BF16),
    ),
    GradientPath(
        "stock DDP, bucket views; clip_grad_norm_",
        f"{_IN}; the norm reads S, the scaling 2 S",
        _clipped,
    ),
    GradientPath(
        "stock DDP, bucket views; AMP's unscale_ and clip_grad_norm_",
        f"{_IN}; unscaling 2 S, the norm S, the scaling 2 S",
        _unscaled_and_clipped,
    ),
    GradientPath(
        "GradientSynchronizer, clip_in_step; CPU",
        "the norm is taken in the collective, the factor in the optimizer's step",
        _clipped_in_step,
        fusing=True,
    ),
    GradientPath(
        "GradientSynchronizer, clip_in_step; device",
        "copies in and out, 4 S; each rank measures its share, S / n",
        _clipped_in_step,
    ),
]
"""What is counted. Bucket views: ``gradient_as_bucket_view=True``. Gradients are None before a step, unless kept."""
