"""What makes the ranks' modules equal before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["broadcast_from_first", "require_equal_shapes"]


def broadcast_from_first(
    tensors: Sequence[Tensor], group: ProcessGroup | None, device: torch.device | None = None
) -> None:
    """Overwrites tensors with those of the group's first rank.

    Args:
        tensors: Of equal shapes and dtypes on all ranks.
        group: None is the default group.
        device: Where they travel, if not where they are.
    """
    root = dist.get_global_rank(group, 0) if group is not None else 0
    with torch.no_grad():
        sent = [tensor.detach() if device is None else tensor.to(device) for tensor in tensors]
        works = [dist.broadcast(tensor, root, group=group, async_op=True) for tensor in sent]
        for work in works:
            work.wait()
        for tensor, arrived in zip(tensors, sent, strict=True):
            if device is not None and arrived is not tensor:
                tensor.copy_(arrived)


def require_equal_shapes(names: Mapping[nn.Parameter, str], group: ProcessGroup | None) -> None:
    """Checks that all ranks have parameters of the same names, shapes and dtypes.

    Raises:
        RuntimeError: They have not; on all ranks, naming the first that differs.
    """
    mine = list(_described(names))
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, mine, group=group)
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


def _described(names: Mapping[nn.Parameter, str]) -> Iterable[str]:
    for parameter, name in names.items():
        yield f"{name} of {tuple(parameter.shape)} {parameter.dtype}"
