"""Ways to train at one rank on a GPU: for ``fastcoll.bench.surroundings`` to time what they add to a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastcoll
import fastcoll.fsdp
from fastcoll.bench.attachments import (
    NEVER,
    STOCK,
    STOCK_WAYS,
    Attached,
    FusedOptimizer,
    clipped_in_step,
    hooked,
    scale_made,
    synchronized,
)
from fastcoll.bench.gradients import EmulatedModel
from fastcoll.cuda.algorithms import Call, Topology
from fastcoll.cuda.selector import fuses
from fastcoll.cuda.thresholds import DEFAULT
from fastcoll.ddp import FusedGradScaler, GradientSynchronizer

__all__ = [
    "ALONE",
    "Groups",
    "StepPath",
    "blocks_of",
    "in_lists",
    "local_gradient",
    "step_paths",
]

ALONE = "no data parallelism"
_BF16 = torch.bfloat16

_STOCK_PASSES = {
    STOCK: 4,
    f"{STOCK}, bucket views": 2,
    f"{STOCK}, batched_grad_copy": 6,
    f"{STOCK}, batched_grad_copy, bucket views": 4,
    "bf16_compress_hook": 8,
    "bf16_compress_hook, bucket views": 6,
    f"{STOCK}, bucket views; clip_grad_norm_": 5,
    f"{STOCK}, bucket views; AMP's unscale_ and clip_grad_norm_": 7,
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """Of this one rank.

    Attributes:
        stock: Of NCCL.
        fastcoll: Of fastcoll: one rank hands every all-reduce to NCCL, tensor by tensor.
        several: Of fastcoll, made with FASTCOLL_ALGO=nccl: lists go through a bucket, as between several ranks.
    """

    stock: dist.ProcessGroup
    fastcoll: dist.ProcessGroup
    several: dist.ProcessGroup


@dataclass(frozen=True)
class StepPath:
    """A way to train.

    Attributes:
        name: Row of the table.
        attach: Makes a model train so.
        passes: The bytes that it moves around the collectives, by design, over those of all gradients; None: unknown.
        base: The row without data parallelism that is taken away.
        kept: Whether gradients are zeroed before the step, and not set to None.
        blocks: Whether the model is a chain of blocks, for FSDP.
    """

    name: str
    attach: Callable[[nn.Module], Attached]
    passes: float | None = None
    base: str = ALONE
    kept: bool = False
    blocks: bool = False


def blocks_of(shapes: Sequence[Shape], cap: int, itemsize: int = 4) -> list[list[Shape]]:
    """Cuts a model into blocks of at least so many bytes, in the order of its parameters."""
    blocks: list[list[Shape]] = [[]]
    filled = 0
    for shape in shapes:
        if filled >= cap:
            blocks.append([])
            filled = 0
        blocks[-1].append(shape)
        filled += math.prod(shape) * itemsize
    return blocks


def in_lists(lists: Sequence[Sequence[Shape]]) -> float:
    """Returns the bytes that copies of float32 lists into buckets and back move, over those of all tensors.

    A list of few or large tensors is not copied: each of them is reduced for itself.
    """
    moved = total = 0
    for shapes in lists:
        sizes = tuple(map(math.prod, shapes))
        call = Call(torch.float32, "AVG", sizes)
        fused = len(sizes) > 1 and fuses(sizes, call, Topology(1, kernels=True), DEFAULT, "nccl")
        moved += 4 * fused * sum(sizes)
        total += sum(sizes)
    return moved / total


def step_paths(
    groups: Groups,
    device: torch.device,
    shapes: Sequence[Shape],
    buckets: Sequence[Sequence[Shape]],
) -> list[StepPath]:
    """Returns what is timed, the rows without data parallelism first.

    Args:
        groups: Of this rank.
        device: Of the model.
        shapes: Of the parameters.
        buckets: How a GradientSynchronizer cuts them.
    """
    hook = partial(hooked, group=groups.fastcoll)
    lists, whole = in_lists(buckets), in_lists([shapes])
    views: dict[str, Any] = {"gradient_as_bucket_view": True}
    kept, chain = f"{ALONE}, gradients kept", f"{ALONE}, in blocks"
    synchronizer = partial(synchronized, group=groups.several)
    stock = (
        StepPath(name, partial(attach, group=groups.stock), _STOCK_PASSES[name])
        for name, attach in STOCK_WAYS.items()
    )
    return [
        StepPath(ALONE, Attached),
        StepPath(kept, Attached, kept=True, base=kept),
        StepPath(chain, Attached, base=chain, blocks=True),
        *stock,
        StepPath("fused hook", hook, 4),
        StepPath("fused hook, bucket views", partial(hook, **views), 2),
        StepPath(
            "fused hook, bucket views, gradients kept",
            partial(hook, **views),
            0,
            base=kept,
            kept=True,
        ),
        StepPath("fused hook, bf16 wire", partial(hook, wire=_BF16), 7),
        StepPath("fused hook, bf16 wire, bucket views", partial(hook, wire=_BF16, **views), 5),
        StepPath("GradientSynchronizer", synchronizer, lists),
        StepPath(
            "GradientSynchronizer, as at one rank", partial(synchronized, group=groups.fastcoll), 0
        ),
        StepPath("GradientSynchronizer, bf16 wire", partial(synchronizer, wire_dtype=_BF16), 3),
        StepPath(
            "GradientSynchronizer; norm, clip_in_step",
            partial(clipped_in_step, group=groups.several),
            lists + 1,
        ),
        StepPath(
            "GradientSynchronizer; AMP's unscaling and clipping in the step",
            partial(_unscaled_in_step, groups.several),
            lists + 1,
        ),
        StepPath("all_reduce_coalesced of all", partial(_coalesced, groups.several), whole),
        StepPath(
            "all_reduce_coalesced of all, as at one rank", partial(_coalesced, groups.fastcoll), 0
        ),
        StepPath(
            "all_reduce_coalesced of all, bf16 wire",
            partial(_coalesced, groups.several, wire_dtype=_BF16),
            3,
        ),
        StepPath("FSDP2", partial(_sharded, groups.stock, device, False), base=chain, blocks=True),
        StepPath(
            "FSDP2, fastcoll.fsdp.apply",
            partial(_sharded, groups.fastcoll, device, True),
            base=chain,
            blocks=True,
        ),
    ]


def _unscaled_in_step(group: dist.ProcessGroup, model: nn.Module) -> Attached:
    device = next(model.parameters()).device
    synchronizer = GradientSynchronizer(model, group, gradient_norm=True)
    scaler = FusedGradScaler(
        synchronizer, device=device.type, init_scale=1.0, growth_interval=1 << 30
    )
    optimizer = FusedOptimizer(model)
    scale_made(scaler, device)
    return Attached(model, lambda: scaler.clip_grad_norm_(optimizer, NEVER))


def _coalesced(
    group: dist.ProcessGroup, model: nn.Module, wire_dtype: torch.dtype | None = None
) -> Attached:
    parameters = list(model.parameters())[::-1]

    def after() -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        fastcoll.all_reduce_coalesced(grads, dist.ReduceOp.AVG, group, wire_dtype=wire_dtype)

    return Attached(model, after)


def _sharded(
    group: dist.ProcessGroup, device: torch.device, plugs: bool, model: nn.Module
) -> Attached:
    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in model.modules():
        if isinstance(part, EmulatedModel):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if plugs:
        fastcoll.fsdp.apply(model)
    return Attached(model)


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the gradient of a parameter, or of this rank's shard of it."""
    grad = parameter.grad
    return grad.to_local() if grad is not None and hasattr(grad, "to_local") else grad
