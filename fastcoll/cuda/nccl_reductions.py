"""Sums of inputs that each rank multiplies by a factor first: NCCL's PreMulSum, which CuPy does not bind."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fastcoll.cuda.nccl_library import NcclLibrary

__all__ = ["FactorOnDevice", "PreMulSums"]

_KEPT = 16  # operations


@dataclass(frozen=True)
class FactorOnDevice:
    """PREMUL_SUM by a factor of the collective's dtype, or of its parts', in the device's memory.

    Attributes:
        address: Where it lies while the collective runs.
    """

    address: int
    op: ClassVar[dist.ReduceOp.RedOpType] = dist.ReduceOp.PREMUL_SUM


class PreMulSums:
    """The operations of one communicator, made when first needed and kept, the latest of them.

    NCCL reads a factor on the host when the operation is made, and one on the device when a collective runs.
    An operation may be destroyed as soon as the calls that it was given to have returned; those that are left end
    with their communicator.
    """

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library
        self._numbers: dict[tuple[bytes | int, int], int] = {}

    def number(self, handle: int, op: Any, dtype: torch.dtype, type_code: int) -> int:
        """Returns the operation's number.

        Args:
            handle: The communicator.
            op: A ``dist.ReduceOp`` with a factor, a number or a tensor of one element; or FactorOnDevice.
            dtype: Of the collective.
            type_code: NCCL's number of it, or of a complex dtype's parts.

        Raises:
            StatusError: NCCL refused.
            TypeError: The tensor has another dtype than the collective, or there is no factor.
        """
        factor = op.address if isinstance(op, FactorOnDevice) else _factor_of(op)
        real = dtype.to_real() if dtype.is_complex else dtype
        scalar: bytes | int
        if isinstance(op, FactorOnDevice):
            scalar = op.address
        elif isinstance(factor, torch.Tensor):
            if factor.dtype != real or factor.numel() != 1:
                raise TypeError(
                    f"expected a factor of one element of {real}, got {factor.numel()} of {factor.dtype}"
                )
            scalar = factor.data_ptr()
        else:
            host = torch.tensor([factor], dtype=torch.float64).to(real).view(torch.uint8)
            scalar = bytes(host.tolist())
        key = (scalar, type_code)
        if (known := self._numbers.pop(key, None)) is None:
            if len(self._numbers) == _KEPT:
                oldest = next(iter(self._numbers))
                self._library.destroy_op(handle, self._numbers.pop(oldest))
            known = self._library.create_pre_mul_sum(handle, scalar, type_code)
        self._numbers[key] = known  # now the latest
        return known


def _factor_of(op: Any) -> float | torch.Tensor:
    factor: float | torch.Tensor | None = None
    if type(op) is not dist.ReduceOp.RedOpType:
        with contextlib.suppress(RuntimeError):  # torch's, for an operation without its factor
            factor = op.__getstate__()[1]
    if factor is None:
        raise TypeError("expected PREMUL_SUM with a factor: torch's _make_nccl_premul_sum(factor)")
    return factor
