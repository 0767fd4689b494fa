"""Whether a GPU's atomic operations on another GPU's memory are atomic, as the driver reports.

Kernels set flags in the peers' memory by atomic operations. NVLink carries them. Over PCIe many machines do not, even
if peers can map each other's memory, and a flag may then be lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

__all__ = ["without_atomics"]

_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, in cuda.h


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")  # torch has loaded and initialized it


def without_atomics(own: int, others: Iterable[int]) -> list[int]:
    """Returns the other devices whose memory takes no atomic operations from a device.

    Args:
        own: Index of the device in this process.
        others: Indices of other devices. A device that the driver has no data for is not returned.
    """
    try:
        driver = _driver()
        ask, find = driver.cuDeviceGetP2PAttribute, driver.cuDeviceGet
    except (OSError, AttributeError):
        return []

    def handle(index: int) -> ctypes.c_int | None:
        found = ctypes.c_int(-1)
        return None if find(ctypes.byref(found), ctypes.c_int(index)) else found

    def lacks(other: int) -> bool:
        value, source, target = ctypes.c_int(1), handle(own), handle(other)
        if source is None or target is None:
            return False
        return (
            ask(ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, source, target) == 0
            and value.value == 0
        )

    return [other for other in others if other != own and lacks(other)]
