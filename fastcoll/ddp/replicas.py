"""Makes the modules of all ranks equal before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastcoll._group_backend import is_outside

__all__ = ["broadcast_from_first", "require_equal_shapes", "require_trainable"]

_MESSAGE = 250 << 20
"""Bytes."""


def broadcast_from_first(
    tensors: Sequence[Tensor], group: ProcessGroup | None, device: torch.device | None = None
) -> None:
    """Overwrites tensors with those of the group's first rank.

    Args:
        tensors: Tensors, with equal shapes and dtypes on all ranks.
        group: The group. None: the default group.
        device: Device from which they travel. None: their own.
    """
    if not tensors:
        return
    with torch.no_grad():
        sent = [tensor.detach() if device is None else tensor.to(device) for tensor in tensors]
        # DDP's own call: one message for each dtype and device, instead of one for each buffer.
        group = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, sent, _MESSAGE, 0)  # type: ignore[attr-defined]
        for tensor, arrived in zip(tensors, sent, strict=True):
            if device is not None and arrived is not tensor:
                tensor.copy_(arrived)


def require_equal_shapes(
    names: Mapping[nn.Parameter, str], group: ProcessGroup | None
) -> dict[nn.Parameter, list[int]]:
    """Checks that the parameters of all ranks have the same names, shapes, dtypes and ``requires_grad``.

    Returns:
        The dimensions of each parameter that is not in row-major order in memory, the outermost first. They are those
        of rank 0, also where this rank's parameter is in another order.

    Raises:
        RuntimeError: They differ; raised on all ranks, with the first difference.
    """
    orders = [sorted(range(p.dim()), key=lambda dim, p=p: -p.stride(dim)) for p in names]  # type: ignore[misc]
    found: list[tuple[list[str], list[list[int]]]] = [([], [])] * dist.get_world_size(group)
    described = [
        f"{name} of {tuple(one.shape)} {one.dtype}{'' if one.requires_grad else ', frozen'}"
        for one, name in names.items()
    ]
    dist.all_gather_object(found, (described, orders), group=group)
    everywhere = [theirs for theirs, _ in found]
    for rank, theirs in enumerate(everywhere):
        if theirs == everywhere[0]:
            continue
        first = next(
            (pair for pair in zip(everywhere[0], theirs, strict=False) if pair[0] != pair[1]),
            (f"{len(everywhere[0])} parameters", f"{len(theirs)}"),
        )
        raise RuntimeError(
            f"fastcoll.GradientSynchronizer [rank {dist.get_rank(group)}/{len(everywhere)}]: expected the same "
            f"parameters on all ranks, got {first[0]} on rank 0 and {first[1]} on rank {rank}. Build the same model."
        )
    first_orders = zip(names, found[0][1], strict=True)
    return {parameter: order for parameter, order in first_orders if order != sorted(order)}


def require_trainable(module: nn.Module, group: ProcessGroup | None) -> None:
    """Checks without communication that the group is usable, and the module has parameters with data and no wrapper.

    Raises:
        ValueError: One of these is false.
    """
    problem = ""
    if is_outside(group):
        problem = (
            "a group that this rank is in, got one without it. Make it on the group's ranks only"
        )
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        problem = "a module, got DistributedDataParallel. Pass its .module, or use its hook"
    elif not any(True for _ in module.parameters()):
        problem = f"a module with parameters, got {type(module).__name__} without"
    elif any(isinstance(p, nn.UninitializedParameter) or p.is_meta for p in module.parameters()):
        problem = "parameters with data, got some on device meta or lazy ones. Materialise them"
    if problem:
        raise ValueError(f"fastcoll.GradientSynchronizer: expected {problem}.")
