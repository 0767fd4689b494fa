"""The squares of a step's gradients, measured while they are reduced, and what clipping makes of them.

A bucket is measured in one of two ways, by its sizes and settings, which are equal on all ranks:

- A kernel that writes all elements on each rank also sums their squares. Each rank then has all sums, with equal bits.
- Each rank measures its share of the bucket. The ranks exchange the sums of their shares once a step, if there are any.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import all_gather_flat, serving_backend
from fastcoll.buckets import used_here

if TYPE_CHECKING:
    from fastcoll.cuda.all_reduce import AllReduces

__all__ = ["Clipping", "Squares", "all_reduces_of", "kernels_of"]

_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm that it divides by."""


class Clipping(NamedTuple):
    """What clipping in an optimizer's step needs.

    Attributes:
        norm: The norm before: float64 [].
        divisor: By what the gradients are divided, 1 or more: float32 [].
        found_inf: 1.0 if a gradient is infinite or NaN, else 0.0: float32 [].
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor


class Squares:
    """The sums of squares of one step, on one device.

    Args:
        process_group: The group that reduces the gradients. None: the default group.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._group = process_group
        self._most = 0  # sums that kernels wrote in the last step that had any
        self._used: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all sums: a step begins."""
        self._most = sum(self._used) or self._most
        self._memory: list[Tensor] = []  # of each, `_used` elements are sums
        self._used = []
        self._stream: torch.Stream | None = None
        self._shares: list[Tensor] = []
        self._every: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._used or self._shares or self._every is not None)

    def new_share(self, like: Tensor) -> Tensor:
        """Returns the sum of squares of this rank's share of a bucket, 0 at first: float64 [1]."""
        self._shares.append(torch.zeros(1, dtype=torch.float64, device=like.device))
        return self._shares[-1]

    def new_sums(self, count: int, device: torch.device) -> Tensor:
        """Returns memory for sums that kernels make of what they write: float64 [count].

        The sums of a step lie one behind the other, unless a bucket comes from another stream or there are more than
        in the step before.
        """
        stream = torch.accelerator.current_stream(device)
        first = self._used[-1] if self._used else 0
        if not first or stream != self._stream or first + count > self._memory[-1].numel():
            room = max(count, self._most - sum(self._used))
            self._memory.append(torch.empty(room, dtype=torch.float64, device=device))
            self._used.append(first := 0)
            self._stream = stream
        self._used[-1] += count
        return self._memory[-1][first : first + count]

    def norm(self) -> Tensor:
        """Returns the norm of all gradients, with the same bits on all ranks: float64 [].

        The first call of a method in a step exchanges the shares' sums, if there are any. Then all ranks must make it.
        """
        measured = self._by_kernel(math.inf)
        return self._joined().sum().sqrt() if measured is None else measured.norm

    def clipping(self, max_norm: float) -> Clipping:
        """Returns ``norm`` and what follows from it for clipping to ``max_norm``."""
        measured = self._by_kernel(max_norm)
        if measured is not None:
            return measured
        norm = self.norm()
        divisor = ((norm + _EPSILON) / max_norm).clamp(min=1.0)
        return Clipping(norm, divisor.float(), (~norm.isfinite()).float())

    def _by_kernel(self, max_norm: float) -> Clipping | None:
        every = self._joined()
        kernels = kernels_of(self._group, every.device)
        if kernels is None:
            return None
        result = every.new_empty(2)
        kernels.norm(every, result, max_norm, _EPSILON)
        divisor, found_inf = result[1:].view(torch.float32)
        return Clipping(result[0], divisor, found_inf)

    def _joined(self) -> Tensor:
        """Returns sums, float64 [any], which add up to the square of the norm."""
        if self._every is not None:
            return self._every
        parts = [
            used_here(memory)[:used] for memory, used in zip(self._memory, self._used, strict=True)
        ]
        if self._shares:
            own = torch.stack([used_here(share).reshape(1) for share in self._shares]).sum(0)
            ranks = dist.get_world_size(self._group)
            if ranks > 1:
                # Not all-reduced: no kernel between ranks sums float64, and FASTCOLL_ALGO may ask for one.
                every = own.new_empty(ranks)
                all_gather_flat(every, own, group=self._group)
                own = every
            parts.append(own)
        self._every = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._every


def kernels_of(group: ProcessGroup | None, device: torch.device) -> AllReduces | None:
    """Returns what plans a group's all-reduces on a device, if kernels run on all its ranks; else None.

    It is None before the group's first call on the device, and until the ranks have agreed on kernels.
    """
    group = group or dist.group.WORLD
    if group is None or serving_backend(group, device) is None or device.type == "cpu":
        return None
    reduces = all_reduces_of(group, device)
    return reduces if reduces is not None and reduces.region.topology.kernels else None


def all_reduces_of(group: ProcessGroup, device: torch.device) -> AllReduces | None:
    """Returns what plans the all-reduces of a group of fastcoll on a device; None before its first call there."""
    from fastcoll.cuda.engine import engine_of

    engine = engine_of(group.group_name)
    return engine.all_reduces.get(device.index) if engine is not None else None
