"""Ways to train a module in data parallel over a backend, by the word after the backend's name."""

# No `from __future__ import annotations`: DDP reads the hook's annotations.
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

__all__ = ["WAYS", "missing_way"]


def _ddp(model: nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, **options)


def _hooked(
    state_of: Callable[[Any], Any],
    hook: Callable[..., Future[Any]],
    model: nn.Module,
    group: Any,
    **options: Any,
) -> DistributedDataParallel:
    """DDP with a hook; its gradients are views of the buckets."""
    ddp = _ddp(model, group, **{"gradient_as_bucket_view": True, **options})
    ddp.register_comm_hook(state_of(group), hook)
    return ddp


def _synchronizer(
    model: nn.Module, group: Any, wire: torch.dtype | None = None, **options: Any
) -> nn.Module:
    """The model itself with a GradientSynchronizer."""
    options.pop("gradient_as_bucket_view", None)  # for DDP only: gradients have no bucket here
    GradientSynchronizer(model, group, wire_dtype=wire, **options)
    return model


def _give_back(state: None, bucket: GradBucket) -> Future[Tensor]:
    """Returns the bucket unchanged."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


_BF16 = torch.bfloat16
WAYS: dict[str, Callable[..., nn.Module]] = {
    "": _ddp,
    "batched": partial(_ddp, batched_grad_copy=True),  # copies the gradients of a bucket at once
    "bf16": partial(_hooked, lambda group: group, bf16_compress_hook),
    "digest": _ddp,
    "fused": partial(_hooked, FusedAllreduceState, fused_allreduce_hook),
    "fused-bf16": partial(
        _hooked, partial(FusedAllreduceState, wire_dtype=_BF16), fused_allreduce_hook
    ),
    "shared": _ddp,
    "sync": _synchronizer,
    "sync-bf16": partial(_synchronizer, wire=_BF16),
    "unreduced": partial(_hooked, lambda _: None, _give_back, gradient_as_bucket_view=False),
}
"""(model, group, options of DDP) -> trained module. "gloo-batched" is the backend gloo and the way "batched"."""


def missing_way(way: str) -> str:
    """Returns the reason if there is no such way, or ""."""
    if way not in WAYS:
        return f"{way!r} is no way to train; there are {', '.join(filter(None, WAYS))}"
    known = inspect.signature(DistributedDataParallel).parameters
    if way == "batched" and "batched_grad_copy" not in known:
        return f"torch {torch.__version__} has no DistributedDataParallel(batched_grad_copy=True)"
    return ""
