"""How a model is made to train in each way: for ``fastcoll.bench.surroundings`` to time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

__all__ = [
    "NEVER",
    "STOCK",
    "STOCK_WAYS",
    "Attached",
    "FusedOptimizer",
    "clipped_in_step",
    "hooked",
    "scale_made",
    "synchronized",
]

STOCK = "stock DDP"
NEVER = 1e30
"""A norm to clip to: the factor is 1, and the work is done."""

Group = dist.ProcessGroup | None


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


def _ddp(model: nn.Module, group: Group = None, **options: Any) -> Attached:
    return Attached(DistributedDataParallel(model, process_group=group, **options))


def _bf16_compress(model: nn.Module, group: Group = None, **options: Any) -> Attached:
    attached = _ddp(model, group, **options)
    # By another name, for DDP refuses the hook itself on CPU tensors, and looks at annotations.
    attached.module.register_comm_hook(  # type: ignore[operator]
        group, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    )
    return attached


def _clipped(model: nn.Module, group: Group = None) -> Attached:
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return Attached(ddp, lambda: nn.utils.clip_grad_norm_(model.parameters(), NEVER))


def _unscaled_and_clipped(model: nn.Module, group: Group = None) -> Attached:
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scale_made(scaler, device)

    def after() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), NEVER)
        scaler.update()

    return Attached(ddp, after)


def _stock_ways() -> dict[str, Callable[..., Attached]]:
    views: dict[str, Any] = {"gradient_as_bucket_view": True}
    ways: dict[str, Callable[..., Attached]] = {
        STOCK: _ddp,
        f"{STOCK}, bucket views": partial(_ddp, **views),
    }
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        batched = partial(_ddp, batched_grad_copy=True)
        ways[f"{STOCK}, batched_grad_copy"] = batched
        ways[f"{STOCK}, batched_grad_copy, bucket views"] = partial(batched, **views)
    return {
        **ways,
        "bf16_compress_hook": _bf16_compress,
        "bf16_compress_hook, bucket views": partial(_bf16_compress, **views),
        f"{STOCK}, bucket views; clip_grad_norm_": _clipped,
        f"{STOCK}, bucket views; AMP's unscale_ and clip_grad_norm_": _unscaled_and_clipped,
    }


STOCK_WAYS = _stock_ways()
"""torch's own by name, those that this torch has: take a model, and a group or None for the default one."""


def hooked(
    model: nn.Module, group: Group = None, wire: torch.dtype | None = None, **options: Any
) -> Attached:
    """Attaches DDP with the fused hook; `options` are DDP's."""
    attached = _ddp(model, group, **options)
    state = FusedAllreduceState(group, wire_dtype=wire)
    attached.module.register_comm_hook(state, fused_allreduce_hook)  # type: ignore[operator]
    return attached


def synchronized(model: nn.Module, group: Group = None, **options: Any) -> Attached:
    """Attaches a GradientSynchronizer; `options` are its."""
    GradientSynchronizer(model, group, **options)
    return Attached(model)


def clipped_in_step(model: nn.Module, group: Group = None) -> Attached:
    """Attaches a GradientSynchronizer that leaves clipping to the optimizer's step."""
    synchronizer = GradientSynchronizer(model, group, gradient_norm=True)
    optimizer = FusedOptimizer(model)
    return Attached(model, lambda: synchronizer.clip_in_step(optimizer, NEVER))


class FusedOptimizer(torch.optim.SGD):
    """Takes the scale as a fused one does; its step, which is no part of what is measured, is never called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self._step_supports_amp_scaling = True


def scale_made(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Has a scaler make its scale, as its first loss would."""
    scaler.scale(torch.ones(1, device=device))
