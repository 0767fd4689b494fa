"""``fastcoll.empty_shared`` and ``fastcoll.share``: tensors in memory that the ranks of a host share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import needed_cpu_backend

__all__ = ["empty_shared", "share"]


def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Returns a CPU tensor in shared memory, which peers on this host read and reduce in place.

    Every collective takes any tensor, but does not copy a tensor of this function. An all-reduce costs one pass over
    it. Peers read it in place in all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast and
    send. All groups of the process can use it. If the ranks are on several hosts, it is like any other tensor.

    Args:
        size: The shape: integers, or one sequence of integers, as for ``torch.empty``.
        dtype: Any dtype. None: ``torch.get_default_dtype()``.
        group: A group whose CPU tensors fastcoll serves. None: the default group.

    Returns:
        A contiguous tensor. It is zero if its memory is new. It may outlive the group.

    Raises:
        ValueError: fastcoll does not serve the group's CPU tensors, or a size is negative.
        TypeError: A size is not an integer.
        dist.DistBackendError: The memory does not suffice. The message names the remedy.
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


def share(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Moves a CPU tensor into shared memory, once, as if ``empty_shared`` had made it.

    Views and arrays of numpy made before keep the old memory, so move a tensor before they are made.

    Args:
        tensor: A tensor whose elements lie in memory without gaps and overlaps; a parameter, too.
        group: A group whose CPU tensors fastcoll serves. None: the default group.

    Returns:
        The same tensor, with its strides. A tensor that is in shared memory stays as it is.

    Raises:
        ValueError: fastcoll does not serve the group's CPU tensors, or the tensor has gaps or overlaps.
        dist.DistBackendError: The memory does not suffice. The message names the remedy.
    """
    backend = needed_cpu_backend(group, "share", "no call for another backend")
    dense = torch.empty_like(tensor, device="meta")  # keeps strides without gaps and overlaps
    if dense.stride() != tensor.stride() or not tensor.is_cpu:
        raise ValueError(
            "fastcoll.share: expected a CPU tensor without gaps and overlaps, got strides "
            f"{tensor.stride()} of the shape {tuple(tensor.shape)} on {tensor.device}"
        )
    if not backend.is_shared(tensor):
        memory = empty_shared(tensor.numel(), dtype=tensor.dtype, group=group)
        moved = memory.as_strided(tensor.size(), tensor.stride())
        tensor.data = moved.copy_(tensor.detach())
    return tensor
