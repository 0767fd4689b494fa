"""``fastcoll.check_same``: whether all ranks have the same bits in a module's parameters."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fastcoll._group_backend import is_outside
from fastcoll._load import C

__all__ = ["check_same"]

_NAMED = 3
"""How many parameters an error names."""


def _whole(name: str, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(
            f"fastcoll.check_same: expected parameters that each rank has as a whole, got '{name}' with placements "
            f"{parameter.placements}. Check the module before it is sharded, or leave this parameter out."
        )
    return parameter.to_local().detach()


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _difference(name: str, found: list[Any]) -> str:
    """Returns "'fc.weight' on rank 2 from that on ranks 0, 1"; `found`: what each rank has under the name."""
    by_value: dict[Any, list[int]] = {}
    for rank, value in enumerate(found):
        by_value.setdefault(value, []).append(rank)
    ordered = sorted(by_value.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    *apart, most = ordered
    sizes = Counter(map(len, ordered))
    if sizes[len(most)] > 1:
        return f"'{name}' between " + " and ".join(map(_ranks, sorted(ordered)))
    return f"'{name}' on {_ranks(sorted(chain(*apart)))} from that on {_ranks(most)}"


def check_same(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Checks that all ranks of a group have the same bits in each parameter of a module. All ranks call it.

    In data-parallel training, parameters must never differ: each later step would make the difference larger. They
    differ if ranks began with different values, or if one rank changed a parameter and the others did not. Buffers are
    not compared, because those of a BatchNorm differ. Each rank reads its parameters once, and sends a digest of 64
    bits for each. Parameters on a GPU are first copied to the CPU.

    Args:
        module: A module that each rank has as a whole, also one in DistributedDataParallel.
        group: Any group of torch, of any backend. None: the default group.

    Raises:
        RuntimeError: Parameters differ, in their bits, dtypes, shapes or names. All ranks raise it. It names the first
            parameters that differ, and their ranks. The majority counts as right.
        ValueError: A parameter is sharded, or this rank is not in the group.
    """
    if is_outside(group):
        raise ValueError(
            "fastcoll.check_same: expected a group with this rank, got one without it."
        )
    own: dict[str, tuple[str, int]] = {}
    for name, parameter in module.named_parameters():
        whole = _whole(name, parameter)
        text = f"{str(whole.dtype).removeprefix('torch.')}{list(whole.shape)}"
        own[name] = (text, C.digest(whole.cpu().contiguous()))
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    names = list(dict.fromkeys(name for found in every for name in found))
    different = [name for name in names if len({found.get(name) for found in every}) > 1]
    if not different:
        return
    named = [_difference(name, [found.get(name) for found in every]) for name in different[:_NAMED]]
    more = "; ..." if len(different) > _NAMED else ""
    raise RuntimeError(
        "fastcoll.check_same: expected parameters with the same bits on all ranks, but "
        f"{len(different)} of {len(names)} differ: {'; '.join(named)}{more}. Look for code that changes them on one "
        "rank only, or begin with equal seeds."
    )
