"""Query of fastcoll.ddp to a device's engine before it passes gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["casts"]


def casts(tensor: Tensor, group: ProcessGroup) -> bool:
    """Returns whether all-reduces of tensors like `tensor` cast to a 16-bit wire and back themselves.

    With peer-mapped memory one kernel does it; over NCCL it is copy-in, all-to-all, one sum in float32, all-gather and
    copy-out. Either way the sum is rounded once. The result is equal on all ranks. It is False for other dtypes than
    float32, if Triton is missing on a rank, and before the group's first call on a device.

    Args:
        tensor: A gradient, or a bucket of gradients.
        group: A fastcoll group on the tensor's device.
    """
    if tensor.is_cpu or tensor.dtype != torch.float32:
        return False
    from fastcoll.cuda.engine import engine_of

    engine = engine_of(group.group_name)
    reduces = engine.all_reduces.get(tensor.device.index) if engine is not None else None
    return reduces is not None and reduces.region.topology.kernels
