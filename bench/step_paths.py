"""Ways to train at one rank on a GPU: for ``fastcoll.bench.surroundings`` to time what they add to a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastcoll
import fastcoll.fsdp
from fastcoll.bench.gradients import EmulatedModel
from fastcoll.bench.traffic_paths import Attached
from fastcoll.cuda.algorithms import Call, Topology
from fastcoll.cuda.selector import fuses
from fastcoll.cuda.thresholds import DEFAULT
from fastcoll.ddp import (
    FusedAllreduceState,
    FusedGradScaler,
    GradientSynchronizer,
    fused_allreduce_hook,
)

__all__ = [
    "ALONE",
    "STOCK",
    "Groups",
    "StepPath",
    "blocks_of",
    "in_lists",
    "local_gradient",
    "step_paths",
]

ALONE = "no data parallelism"
STOCK = "stock DDP"
_BF16 = torch.bfloat16
_NEVER = 1e30  # a norm to clip to: the factor is 1, and the work is done

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
    stock = partial(_ddp, groups.stock)
    hook = partial(_hooked, groups.fastcoll)
    lists, whole = in_lists(buckets), in_lists([shapes])
    views: dict[str, Any] = {"gradient_as_bucket_view": True}
    kept, chain = f"{ALONE}, gradients kept", f"{ALONE}, in blocks"
    synchronizer = partial(_synchronized, groups.several)
    paths = [
        StepPath(ALONE, Attached),
        StepPath(kept, Attached, kept=True, base=kept),
        StepPath(chain, Attached, base=chain, blocks=True),
        StepPath(STOCK, stock, 4),
        StepPath(f"{STOCK}, bucket views", partial(stock, **views), 2),
        *_batched(stock),
        StepPath("bf16_compress_hook", partial(_bf16_compress, groups.stock), 8),
        StepPath(
            "bf16_compress_hook, bucket views", partial(_bf16_compress, groups.stock, **views), 6
        ),
        StepPath(f"{STOCK}, bucket views; clip_grad_norm_", partial(_clipped, groups.stock), 5),
        StepPath(
            f"{STOCK}, bucket views; AMP's unscale_ and clip_grad_norm_",
            partial(_unscaled_and_clipped, groups.stock, device),
            7,
        ),
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
            "GradientSynchronizer, as at one rank", partial(_synchronized, groups.fastcoll), 0
        ),
        StepPath("GradientSynchronizer, bf16 wire", partial(synchronizer, wire_dtype=_BF16), 3),
        StepPath(
            "GradientSynchronizer; norm, clip_in_step",
            partial(_clipped_in_step, groups.several),
            lists + 1,
        ),
        StepPath(
            "GradientSynchronizer; AMP's unscaling and clipping in the step",
            partial(_unscaled_in_step, groups.several, device),
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
    return paths


def _batched(stock: Callable[..., Attached]) -> list[StepPath]:
    if "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters:
        return []
    name = f"{STOCK}, batched_grad_copy"
    return [
        StepPath(name, partial(stock, batched_grad_copy=True), 6),
        StepPath(
            f"{name}, bucket views",
            partial(stock, batched_grad_copy=True, gradient_as_bucket_view=True),
            4,
        ),
    ]


def _ddp(group: dist.ProcessGroup, model: nn.Module, **options: Any) -> Attached:
    return Attached(DistributedDataParallel(model, process_group=group, **options))


def _bf16_compress(group: dist.ProcessGroup, model: nn.Module, **options: Any) -> Attached:
    attached = _ddp(group, model, **options)
    # By another name, for DDP refuses the hook itself on CPU tensors.
    attached.module.register_comm_hook(  # type: ignore[operator]
        group, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    )
    return attached


def _hooked(
    group: dist.ProcessGroup, model: nn.Module, wire: torch.dtype | None = None, **options: Any
) -> Attached:
    attached = _ddp(group, model, **options)
    state = FusedAllreduceState(group, wire_dtype=wire)
    attached.module.register_comm_hook(state, fused_allreduce_hook)  # type: ignore[operator]
    return attached


def _clipped(group: dist.ProcessGroup, model: nn.Module) -> Attached:
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return Attached(ddp, lambda: nn.utils.clip_grad_norm_(model.parameters(), _NEVER))


def _scaled(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Has a scaler make its scale, as its first loss would."""
    scaler.scale(torch.ones(1, device=device))


def _unscaled_and_clipped(
    group: dist.ProcessGroup, device: torch.device, model: nn.Module
) -> Attached:
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _scaled(scaler, device)

    def after() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), _NEVER)
        scaler.update()

    return Attached(ddp, after)


def _synchronized(group: dist.ProcessGroup, model: nn.Module, **options: Any) -> Attached:
    GradientSynchronizer(model, group, **options)
    return Attached(model)


def _clipped_in_step(group: dist.ProcessGroup, model: nn.Module) -> Attached:
    synchronizer = GradientSynchronizer(model, group, gradient_norm=True)
    optimizer = _FusedOptimizer(model)
    return Attached(model, lambda: synchronizer.clip_in_step(optimizer, _NEVER))


def _unscaled_in_step(group: dist.ProcessGroup, device: torch.device, model: nn.Module) -> Attached:
    synchronizer = GradientSynchronizer(model, group, gradient_norm=True)
    scaler = FusedGradScaler(
        synchronizer, device=device.type, init_scale=1.0, growth_interval=1 << 30
    )
    optimizer = _FusedOptimizer(model)
    _scaled(scaler, device)
    return Attached(model, lambda: scaler.clip_grad_norm_(optimizer, _NEVER))


class _FusedOptimizer(torch.optim.SGD):
    """Takes the scale as a fused one does; its step, which is no part of what is timed, is never called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self._step_supports_amp_scaling = True


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
