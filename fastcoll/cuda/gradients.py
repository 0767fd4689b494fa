"""What fastcoll.ddp asks of a device's engine before it gives it gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["casts"]


def casts(tensor: Tensor, group: ProcessGroup) -> bool:
    """Tells whether all-reduces like one of `tensor` take it to a 16-bit wire and back themselves.

    By one kernel where ranks map memory of each other; over NCCL by copy-in, all-to-all, one sum in float32, all-gather
    and copy-out. Either way the sum is rounded once. Known to all ranks alike: not without float32, not where Triton is
    missing on a rank, and not before the group's first call on a device.

    Args:
        tensor: A gradient, or a bucket of them.
        group: Of fastcoll, for the tensor's device.
    """
    if tensor.is_cpu or tensor.dtype != torch.float32:
        return False
    from fastcoll.cuda.engine import engine_of

    engine = engine_of(group.group_name)
    reduces = engine.all_reduces.get(tensor.device.index) if engine is not None else None
    return reduces is not None and reduces.region.topology.kernels
