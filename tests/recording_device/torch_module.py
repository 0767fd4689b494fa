"""The module ``torch.recording``: the functions that generic code looks up by the device's name."""

import contextlib
from collections.abc import Iterator

import torch

Event = torch.Event
Stream = torch.Stream
Device = torch.device | str | int | None
DEVICES = 0
"""Number of devices, set from the compiled library."""

device = torch.accelerator.device_index
current_device = torch.accelerator.current_device_index
set_stream = torch.accelerator.set_stream


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def device_count() -> int:
    return DEVICES


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(
        stream_id=0, device_index=index, device_type=current_stream(index).device_type
    )


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make the stream current on its device, and that device current."""
    if stream is None:
        yield
    else:
        with stream:
            yield


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def manual_seed(seed: int) -> None:
    """Do nothing: the CPU's generator is used, which torch.manual_seed has seeded."""


manual_seed_all = manual_seed


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    torch.set_rng_state(state)


def _is_in_bad_fork() -> bool:
    return False
