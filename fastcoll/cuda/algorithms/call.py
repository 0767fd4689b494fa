"""A collective as all ranks of a group see it, and what the group can do: the inputs of the selector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "COPIED",
    "SUMMED",
    "Call",
    "Topology",
    "depends_on_order",
    "refuse_sum",
]

SUMMED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that the kernels between ranks sum."""

COPIED = (*SUMMED, torch.float64)
"""Dtypes that the kernels copy between a list and its bucket, and scale, and that ``reduce`` sums."""

_WIRES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16))


@dataclass(frozen=True)
class Call:
    """One all-reduce of a tensor or of a list as one bucket, or another collective of a tensor.

    Nothing here depends on addresses, which differ between ranks, so all ranks choose the same algorithm.

    Attributes:
        dtype: Dtype of the tensors.
        op: "SUM", "AVG", "MIN", "MAX", "PRODUCT", or another of torch's names; "" for an all-gather.
        sizes: Elements of each input tensor of this rank, none 0.
        wire: Wire dtype, if it is narrower than `dtype`.
        scale: Factor of the result.
        collective: "all_reduce", "reduce_scatter", "all_gather" or "reduce".
        root: Of a reduce; else -1.
        premul: Factor of each rank's elements, for PREMUL_SUM; None: only the device knows it.
    """

    dtype: torch.dtype
    op: str
    sizes: tuple[int, ...]
    wire: torch.dtype | None = None
    scale: float = 1.0
    collective: str = "all_reduce"
    root: int = -1
    premul: float | None = 1.0

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(self.sizes)

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype that travels."""
        return self.dtype if self.wire is None else self.wire

    @property
    def wire_bytes(self) -> int:
        """Size of the message as it travels, in bytes."""
        return self.elements * self.wire_dtype.itemsize

    @property
    def is_list(self) -> bool:
        """Whether there are several tensors."""
        return len(self.sizes) > 1

    @property
    def is_plain(self) -> bool:
        """Whether NCCL's own all-reduce needs no bucket: one tensor, and no factor."""
        return len(self.sizes) == 1 and self.scale == 1.0

    @property
    def depends_on_order(self) -> bool:
        """Whether the result's bits depend on the order in which the ranks' values are combined."""
        return depends_on_order(self.dtype, self.op)

    def __str__(self) -> str:
        name = _name(self.dtype)
        what = f"{len(self.sizes)} tensors of {name}" if self.is_list else f"a tensor of {name}"
        wire = "" if self.wire is None else f" over {_name(self.wire)}"
        factor = "" if self.scale == 1.0 else f", times {self.scale}"
        how = self.op if self.collective == "all_reduce" else f"{self.collective} {self.op}".strip()
        return f"{how} of {what}[{self.elements}]{wire}{factor}"


@dataclass(frozen=True)
class Topology:
    """What the ranks of a group have agreed on; equal on all of them.

    Attributes:
        ranks: Number of ranks.
        kernels: Whether Triton kernels run on all ranks.
        peers: Whether the ranks map each other's memory.
        bucket_bytes: Room for a bucket in that memory.
        reason: Why the ranks do not map it; "" if they do.
    """

    ranks: int
    kernels: bool = False
    peers: bool = False
    bucket_bytes: int = 0
    reason: str = ""


def depends_on_order(dtype: torch.dtype, op: str) -> bool:
    """Returns whether the bits of a reduction depend on the order of its operands."""
    inexact = dtype.is_floating_point or dtype.is_complex
    return inexact and op in ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")


def refuse_sum(
    call: Call, ops: Sequence[str] = ("SUM", "AVG"), dtypes: Sequence[torch.dtype] = SUMMED
) -> str:
    """Returns why kernels with these operations and dtypes do not sum the tensors of a call, or ""."""
    if call.op not in ops:
        return f"the kernels have {', '.join(ops[:-1])} and {ops[-1]}, not {call.op}"
    if call.dtype not in dtypes:
        return f"the kernels add {', '.join(map(_name, dtypes))}, not {_name(call.dtype)}"
    if call.wire is not None and (call.dtype, call.wire) not in _WIRES:
        return f"no kernel takes {_name(call.dtype)} over {_name(call.wire)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
