"""Reports every load, store and atomic of interpreted kernels to the recording device, by address.

So the device checks the order of workspaces, address tables, buckets and this rank's region, beside that of tensors.
Accesses to the peers' regions are not reported, because flags order them, not streams. Nor are accesses to host memory.
"""

import ctypes
import functools
import threading
from collections.abc import Iterable
from typing import Any

import numpy
import recording_device
import torch
from triton.runtime.interpreter import InterpreterBuilder

_Range = tuple[int, int]

_launched = threading.local()  # accesses: those of this thread's running kernel


class _Accesses:
    """Address ranges that a kernel reads (False) and writes (True)."""

    def __init__(self) -> None:
        self.ranges: dict[bool, set[_Range]] = {False: set(), True: set()}

    def note(self, pointers: Any, mask: numpy.ndarray | None, write: bool) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        every = pointers.data.reshape(-1)
        at = (
            every
            if mask is None
            else every[numpy.broadcast_to(mask, pointers.data.shape).reshape(-1)]
        )
        if not at.size:
            return
        first, last = int(at.min()), int(at.max())
        if last - first == (at.size - 1) * size:
            self.ranges[write].add((first, last + size))
        else:
            self.ranges[write].update((int(one), int(one) + size) for one in numpy.unique(at))

    def merged(self) -> list[tuple[int, int, bool]]:
        """Returns address, bytes and whether it is written, for each range on the device."""
        device_of = ctypes.CDLL(None).recordingDeviceOf
        device_of.argtypes = [ctypes.c_void_p]
        return [
            (begin, end - begin, write)
            for write, ranges in self.ranges.items()
            for begin, end in _union(sorted(ranges))
            if device_of(begin) >= 0
        ]


def _union(ranges: Iterable[_Range]) -> list[_Range]:
    found: list[_Range] = []
    for begin, end in ranges:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


@functools.cache
def install(device: str) -> None:
    """Makes this process's launches report, on the device's current stream."""
    from fastcoll.kernels import _launch

    for name, masked, writes in (
        ("create_masked_load", True, (False,)),
        ("create_masked_store", True, (True,)),
        ("create_atomic_rmw", True, (False, True)),
        ("create_atomic_cas", False, (False, True)),
    ):
        _watch(name, masked, writes)
    interpret = _launch._interpret

    def reporting(configuration: Any, *arguments: Any) -> None:
        accesses = _launched.accesses = _Accesses()
        try:
            interpret(configuration, *arguments)
        finally:
            _launched.accesses = None
            name = configuration.kernel.fn.__name__
            recording_device.launch_at(name, accesses.merged(), device)

    _launch._interpret = reporting


def _watch(name: str, masked: bool, writes: tuple[bool, ...]) -> None:
    """Records the accesses of an interpreter method. An addition of 0 is a poll, which only reads."""
    method = getattr(InterpreterBuilder, name)
    is_atomic = name == "create_atomic_rmw"

    def noting(self: Any, *arguments: Any) -> Any:
        accesses = getattr(_launched, "accesses", None)
        if accesses is not None:
            operands = arguments[1:] if is_atomic else arguments
            mask = operands[2 if name != "create_masked_load" else 1].data if masked else None
            polls = is_atomic and arguments[0].name == "ADD" and not operands[1].data.any()
            for write in writes[:1] if polls else writes:
                accesses.note(operands[0], mask, write)
        return method(self, *arguments)

    setattr(InterpreterBuilder, name, noting)


def adopt(memory: torch.Tensor, device: str) -> None:
    """Makes host memory the device's memory, on the device's current stream."""
    stream = torch.accelerator.current_stream(torch.device(device))
    call = ctypes.CDLL(None).recordingDeviceAdopt
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    call(memory.data_ptr(), memory.numel() * memory.element_size(), stream.native_handle)


def forget(address: int) -> None:
    """Undoes ``adopt``, even with work in progress, because torch waits for the device before it unmaps memory."""
    call = ctypes.CDLL(None).recordingDeviceForget
    call.argtypes = [ctypes.c_void_p]
    call(address)
