"""Makes a rank serve the recording device's tensors by fastcoll's engine over NCCL's stand-in."""

import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import recording_device
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

DEVICE = "recording"


def build() -> Path:
    """Builds both libraries and returns the path of the stand-in."""
    recording_device.build()
    return build_stand_in()


def build_stand_in() -> Path:
    """Builds only the stand-in."""
    from fake_nccl.build import build

    return build()


def stand_in() -> ctypes.CDLL:
    """Returns the stand-in, loaded into this process; it must be loaded before CuPy."""
    return ctypes.CDLL(str(build_stand_in()), mode=ctypes.RTLD_GLOBAL)


def inject(text: str) -> None:
    """Adds a fault to the stand-in; see tests/fake_nccl/faults.c."""
    assert stand_in().fakeNcclInject(text.encode()) == 0, text


def called(name: str) -> int:
    """Returns how often this rank has called a stand-in function."""
    library = stand_in()
    library.fakeNcclCall.restype = ctypes.c_char_p
    texts = [library.fakeNcclCall(index) for index in range(library.fakeNcclCallCount())]
    return sum(text.split()[0] == name.encode() for text in texts)


def fault_of(call: Callable[[], object]) -> tuple[str, float]:
    """Returns the text of the fault that a call must raise, and the seconds until it was raised."""
    start = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("expected a fault, got none")


def has_failed(group: dist.ProcessGroup, device: str = DEVICE) -> bool:
    return group._get_backend(torch.device(device)).get_error() != ErrorType.SUCCESS


def used_group(seconds: float | None = None, count: int = 4) -> tuple[dist.ProcessGroup, Tensor]:
    """Returns a group with this timeout that has worked, and the tensor of its call."""
    group = dist.new_group(timeout=seconds and timedelta(seconds=seconds))
    x = torch.ones(count, device=DEVICE)
    dist.all_reduce(x, group=group)
    return group, x


def in_order(case: Callable[..., None], *arguments: object) -> None:
    """Calls a test, and checks that every access to the device is ordered."""
    with recording_device.no_violations():
        case(*arguments)


def prepare() -> None:
    """Prepares a rank: loads device and library, and connects the engine; the rank survives faults."""
    os.environ.setdefault("FASTCOLL_ERROR_HANDLING", "raise")
    recording_device.load()
    stand_in()
    from fastcoll._load import C

    engine = ctypes.CDLL(C.__file__)
    engine.fastcollServeDevice(torch._C._autograd.DeviceType.PrivateUse1.value)
    dist.Backend.backend_capability["fastcoll"] = ["cpu", "cuda", DEVICE]
