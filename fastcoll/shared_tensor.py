"""``fastcoll.empty_shared``: tensors in memory that the ranks of a host share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import needed_cpu_backend

__all__ = ["empty_shared"]


def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Returns a contiguous CPU tensor that peers on this host read where it is, and all-reduce where it is.

    Any tensor can be sent; one of these is not copied on its way. It is all-reduced in place at the cost of one pass
    over it, read in place by all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast and send, and
    serves every group of the process. Where the ranks are on several hosts it is like any other.

    Args:
        size: Integers, or one sequence of them, as for ``torch.empty``.
        dtype: None is ``torch.get_default_dtype()``.
        group: One of fastcoll's for CPU tensors; None is the default group.

    Returns:
        The tensor, zeroed when its memory is new. It may outlive the group.

    Raises:
        ValueError: The group's CPU tensors are not fastcoll's, or a size is negative.
        TypeError: A size is no integer.
        dist.DistBackendError: The memory is lacking; says how to get more.
    """
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
    if any(extent < 0 for extent in shape):
        raise ValueError(f"fastcoll.empty_shared: expected sizes of at least 0, got {tuple(shape)}")
    backend = needed_cpu_backend(group, "empty_shared", "torch.empty for another backend")
    flat: Tensor = backend.allocate_tensor(
        math.prod(shape),
        dtype=dtype or torch.get_default_dtype(),
        device=torch.device("cpu"),
    )
    return flat.view(shape)
