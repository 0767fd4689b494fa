"""Tensors over memory at a known address, because kernel launchers take tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

__all__ = ["tensor_at"]


class _DeviceArray:
    """Bytes on a CUDA device, by the protocol that torch reads."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor over `count` elements at an address; it owns no memory and keeps none alive.

    Args:
        address: Address of the first element on the device.
        count: Number of elements.
        dtype: Their dtype.
        device: Where they are; the CPU if kernels are interpreted.
    """
    size = count * dtype.itemsize
    if not size:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_DeviceArray(address, size), device=device).view(dtype)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
