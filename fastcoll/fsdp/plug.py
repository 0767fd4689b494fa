"""Puts fastcoll's collectives into a model that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastcoll.ddp.statistics import GradientStatistics
from fastcoll.fsdp.comms import FusedAllGather, FusedReduceScatter
from fastcoll.fsdp.staging import Staging

__all__ = ["ShardedGradients", "apply"]


class ShardedGradients(GradientStatistics):
    """What was found of the sharded gradients that the last backward pass has reduced.

    Made by :func:`apply`. Gradients that were accumulated over several passes are more than what the last one
    reduced: accumulate with ``set_requires_gradient_sync(False)`` until the last pass.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        gradient_norm: bool,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(process_group, gradient_norm)
        self._parameters = list(parameters)
        self._under_way = False

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """As of the base class, for parameters that are DTensors."""
        norm = self.grad_norm()
        # Each rank scales its shard, by the same factor.
        grads = [_local(p.grad) for p in parameters if p.grad is not None]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        return norm

    def clip_in_step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Not for DTensors, whose fused optimizers take no scale that is a plain tensor.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "fastcoll.fsdp: expected clip_grad_norm_ for sharded gradients, got clip_in_step, which is for "
            "optimizers of plain tensors."
        )

    def _sum_of_squares(self) -> Tensor:
        if self.gradient_norm and dist.get_world_size(self.process_group) == 1:
            # FSDP reduces nothing, so nothing was measured on its way.
            grads = [_local(p.grad) for p in self._parameters if p.grad is not None]
            if grads:
                norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
                return torch.stack(norms).square().sum()
        return super()._sum_of_squares()

    def _add(self, squares: Tensor) -> None:
        if not self._under_way:
            self._forget()
            self._under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._squares.append(squares)

    def _end(self) -> None:
        self._under_way = False


def apply(
    module: nn.Module,
    *,
    wire_dtype: torch.dtype | None = None,
    gradient_norm: bool = False,
) -> ShardedGradients:
    """Has all FSDP modules in a module, itself included, communicate through fastcoll.

    Args:
        module: Sharded by ``torch.distributed.fsdp.fully_shard``.
        wire_dtype: As of :class:`FusedReduceScatter`. Give FSDP ``reduce_dtype=torch.float32``.
        gradient_norm: Whether norm, ``found_inf`` or clipping will be asked for.

    Returns:
        What to ask for them.

    Raises:
        ValueError: There is no FSDP module in it, or the wire dtype is unknown; or a norm is wanted where shards are
            reduced further (HSDP), or where modules are sharded over different groups.
    """
    modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not modules:
        raise ValueError(
            f"fastcoll.fsdp.apply: expected a module sharded by fully_shard, got {type(module).__name__} with no "
            "FSDPModule in it."
        )
    meshes = [mesh for part in modules for mesh in _meshes(part)]
    groups = {mesh.shard_process_group for mesh in meshes}
    if gradient_norm and (len(groups) != 1 or any(_replicates(mesh) for mesh in meshes)):
        raise ValueError(
            f"fastcoll.fsdp.apply: expected one group of shards without replicas for gradient_norm=True, got "
            f"{len(groups)} groups{', with replicas' if any(map(_replicates, meshes)) else ''}. Use "
            "torch.nn.utils.clip_grad_norm_."
        )
    group = next(iter(groups)) if groups else None
    shards = ShardedGradients(group, gradient_norm, module.parameters())
    staging = Staging()
    gather = FusedAllGather(staging)
    scatter = FusedReduceScatter(wire_dtype, shards._add if gradient_norm else None, staging)
    for part in modules:
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(scatter)
    return shards


def _meshes(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield group.mesh_info


def _replicates(mesh: Any) -> bool:
    return getattr(mesh, "replicate_process_group", None) is not None


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
