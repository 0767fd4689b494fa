"""Puts fastcoll's collectives into a model that FSDP2 has sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fastcoll.fsdp.comms import FusedAllGather, FusedReduceScatter
from fastcoll.fsdp.staging import Staging

__all__ = ["apply"]


def apply(module: nn.Module, *, wire_dtype: torch.dtype | None = None) -> None:
    """Sets fastcoll's collectives in all FSDP2 modules of a module, itself included.

    Clip with ``torch.nn.utils.clip_grad_norm_``, which reads the shards of this rank only.

    Args:
        module: A module sharded by ``torch.distributed.fsdp.fully_shard``.
        wire_dtype: As for ``FusedReduceScatter``. Pass ``reduce_dtype=torch.float32`` to FSDP2 with it.

    Raises:
        ValueError: The module has no FSDP2 module, or the wire dtype is unknown.
    """
    modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not modules:
        raise ValueError(
            f"fastcoll.fsdp.apply: expected a module sharded by fully_shard, got {type(module).__name__} with no "
            "FSDPModule in it."
        )
    staging = Staging()
    gather, scatter = FusedAllGather(staging), FusedReduceScatter(wire_dtype, staging)
    for part in modules:
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(scatter)
