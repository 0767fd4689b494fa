"""How the communication hook of fastcoll.ddp reduces a bucket that lies on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll.cuda.call_options import call_options

__all__ = ["GradientState", "reducer_for"]

_WIRES = (torch.bfloat16, torch.float16)


class GradientState(Protocol):
    """What of the hook's settings counts here."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """DDP's; None is the default group."""

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What gradients travel as; None for their own dtype."""

    @property
    def average(self) -> bool:
        """Whether the sum is divided by the number of ranks."""


def reducer_for(buffer: Tensor, state: GradientState) -> Callable[[], dist.Work] | None:
    """Returns what reduces a bucket in place with the cast to the wire, and the average, inside the all-reduce.

    By one kernel where ranks map memory of each other; over NCCL by copy-in, all-to-all, one sum in float32, all-gather
    and copy-out. Either way the sum is rounded once.

    Args:
        buffer: The bucket.
        state: The hook's.

    Returns:
        A call that starts it; None where the all-reduce cannot do that, by what all ranks know alike: there is no
        narrower wire of 16 bits, no Triton on some rank, or no call on a device was made yet.
    """
    wire = state.wire_dtype
    if wire not in _WIRES or buffer.dtype != torch.float32 or buffer.is_cpu:
        return None
    from fastcoll.cuda.engine import engine_of

    group = state.process_group or dist.group.WORLD
    engine = engine_of(group.group_name) if group is not None else None
    reduces = engine.all_reduces.get(buffer.device.index) if engine is not None else None
    if reduces is None or not reduces.region.topology.kernels:
        return None
    op = dist.ReduceOp.AVG if state.average else dist.ReduceOp.SUM

    def reduce() -> dist.Work:
        with call_options(wire_dtype=wire):
            work: dist.Work = dist.all_reduce(buffer, op, group=group, async_op=True)
        return work

    return reduce
