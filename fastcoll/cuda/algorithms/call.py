"""A collective as all ranks of a group see it, and what the group can do: all that a choice may depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Call", "Topology"]


@dataclass(frozen=True)
class Call:
    """One all-reduce, of a tensor or of a list as one bucket, or one reduce-scatter or all-gather of a tensor.

    Nothing here depends on where tensors lie, which differs between ranks, so that all ranks choose alike.

    Attributes:
        dtype: Of the tensors.
        op: "SUM", "AVG", "MIN", "MAX", "PRODUCT", or another name of torch's; "" of an all-gather.
        sizes: Elements of each tensor that this rank gives, none 0.
        wire: What travels, if that is narrower than `dtype`.
        scale: Factor of the result.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
    """

    dtype: torch.dtype
    op: str
    sizes: tuple[int, ...]
    wire: torch.dtype | None = None
    scale: float = 1.0
    collective: str = "all_reduce"

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(self.sizes)

    @property
    def wire_dtype(self) -> torch.dtype:
        """What travels."""
        return self.dtype if self.wire is None else self.wire

    @property
    def wire_bytes(self) -> int:
        """Size of the message as it travels."""
        return self.elements * self.wire_dtype.itemsize

    @property
    def is_list(self) -> bool:
        """Whether there are several tensors."""
        return len(self.sizes) > 1

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        what = f"{len(self.sizes)} tensors of {name}" if self.is_list else f"a tensor of {name}"
        wire = "" if self.wire is None else f" over {str(self.wire).removeprefix('torch.')}"
        factor = "" if self.scale == 1.0 else f", times {self.scale}"
        how = self.op if self.collective == "all_reduce" else f"{self.collective} {self.op}".strip()
        return f"{how} of {what}[{self.elements}]{wire}{factor}"


@dataclass(frozen=True)
class Topology:
    """What the ranks of a group have found out together; equal on all of them.

    Attributes:
        ranks: How many there are.
        kernels: Whether Triton kernels run on all of them.
        peers: Whether they map memory of each other.
        bucket_bytes: Room for a bucket in that memory.
        reason: Why they do not; "" if they do.
    """

    ranks: int
    kernels: bool = False
    peers: bool = False
    bucket_bytes: int = 0
    reason: str = ""
