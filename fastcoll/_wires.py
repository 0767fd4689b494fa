"""Wire dtypes: those in which tensors of a wider dtype travel, and for which tensors."""

from __future__ import annotations

import torch

__all__ = ["WIRE_DTYPES", "require_wire", "wire_of"]

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes in which gradients may travel: bfloat16, float16."""


def require_wire(who: str, wire: torch.dtype | None) -> None:
    """Checks a wire dtype; `who` is the caller, as the error names it.

    Raises:
        ValueError: It is neither None nor one of ``WIRE_DTYPES``.
    """
    if wire is not None and wire not in WIRE_DTYPES:
        known = ", ".join(map(str, WIRE_DTYPES))
        raise ValueError(f"{who}: expected a wire_dtype of {known} or None, got {wire}")


def wire_of(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype in which tensors of a dtype travel if `wire` is asked for; None: their own."""
    if wire is None or wire.itemsize >= dtype.itemsize or not dtype.is_floating_point:
        return None
    return wire
