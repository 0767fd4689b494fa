"""A device without a GPU on which the order of streams is proved.

``load()`` makes torch's PrivateUse1 the device ``recording``, with two devices of host memory.
Operators are done at once, on CPU; streams, events and the caching allocator are modelled: which work
is ordered with which, and what the host waited for. Whatever touches memory without an order is a
violation, be it that the other access came first by luck.

``load()`` must come before the first backward of the process, for autograd starts its threads then.
Ranks of the fixture ``device_world`` have loaded it.

What is modelled:

- A kernel is ordered after what its stream launched before, what the stream waited for, and what the
  launching host thread waited for. What one host thread waited for is not known to another, unless
  it was started after that or runs backward for it; ``join_threads()`` tells the calling thread.
- Memory belongs to the stream that was current when it was made: another stream that uses it must be
  ordered after what that stream did before, and have its work ordered, or told by ``record_stream``,
  when the memory is freed.
- ``.cpu()``, ``.item()`` and whatever else needs a value or a size on the host waits for the stream;
  copies with ``non_blocking=True`` do not. Host memory itself is not watched.
- ``hold(stream)``: what is launched there from then on is unfinished, with all that waits for it:
  ``query()`` says False, and who synchronizes waits, until ``release``. A stream that is never
  released hangs.

Native libraries report what they do through the C interface in ``csrc/c_interface.cpp``.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import torch_module
from ._build import build, load_library

__all__ = [
    "add_symmetric_memory",
    "build",
    "clear",
    "cpu_view",
    "held",
    "held_rendezvous",
    "hold",
    "join_threads",
    "launch_at",
    "load",
    "log",
    "most_at_once",
    "name_of",
    "no_violations",
    "release",
    "switches_seen",
    "violations",
]

_library: types.ModuleType | None = None


def load() -> None:
    """Make ``recording`` a device of this process; at once if it is one already.

    Raises:
        RuntimeError: autograd has run in this process, without threads for this device.
    """
    global _library
    if _library is not None:
        return
    library = load_library(build())
    torch.utils.rename_privateuse1_backend("recording")
    torch_module.DEVICES = library.DEVICES
    library.share_with_workers()
    torch._register_device_module("recording", torch_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    try:
        torch.zeros(1, device="recording", requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError("load() comes too late: autograd runs without this device") from error
    library.clear()
    _library = library


def violations() -> list[Any]:
    """Return what was found, in order; each has ``kind``, ``text``, ``first`` and ``second``.

    Kinds are "race", "freed early", "not device memory" and "unknown stream". Both sides have
    ``what``, ``stream``, ``address``, ``bytes`` (those that both touch) and ``write``.
    """
    return _loaded().violations()


def log(*kinds: str, stream: torch.Stream | None = None) -> list[Any]:
    """Return what happened, in order; only the entries of these kinds and this stream if given.

    Kinds are launch, allocate, free, record, block, query, synchronize, record_stream, hold and
    release. Entries have ``kind``, ``what``, ``stream`` (as ``name_of`` says it), ``event`` (a number,
    0 for none), ``thread`` (a number) and ``touches``, the memory concerned.
    """
    return [
        entry
        for entry in _loaded().log()
        if (not kinds or entry.kind in kinds)
        and (stream is None or entry.stream == name_of(stream))
    ]


def clear() -> None:
    """Forget violations, log and what was done to the memory so far; release all streams."""
    _loaded().clear()


@contextlib.contextmanager
def no_violations() -> Iterator[None]:
    """Raise AssertionError for violations found inside."""
    before = len(violations())
    yield
    found = violations()[before:]
    if found:
        raise AssertionError("\n".join([f"{len(found)} violations:", *map(repr, found)]))


def name_of(stream: torch.Stream) -> str:
    """Return the stream's name in log and violations, like "recording:0 high 3"."""
    return _loaded().name_of(stream.device_index, stream.stream_id)


def hold(stream: torch.Stream) -> int:
    """Leave what is launched on the stream from now on unfinished; return what ``release`` takes.

    Holds of one stream may overlap: work is finished when those before it are released.
    """
    return _loaded().hold(stream.device_index, stream.stream_id)


def release(token: int) -> None:
    """End one hold."""
    _loaded().release(token)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold the stream inside."""
    token = hold(stream)
    try:
        yield
    finally:
        release(token)


def add_symmetric_memory() -> None:
    """Have torch's symmetric memory serve the device; it maps nothing."""
    _loaded().add_symmetric_memory()


@contextlib.contextmanager
def held_rendezvous() -> Iterator[None]:
    """Have symmetric memory's rendezvous and free wait inside, as for a peer that does not come or a busy device."""
    _loaded().hold_rendezvous(True)
    try:
        yield
    finally:
        _loaded().hold_rendezvous(False)


def switches_seen() -> list[str]:
    """Return what the last rendezvous found in the environment: overlapping devices, no multicast; "" if unset."""
    return _loaded().switches_seen()


def most_at_once() -> int:
    """Return how many calls of rendezvous were under way together, at most, since they were held last."""
    return _loaded().most_at_once()


def join_threads() -> None:
    """Tell the calling thread what other threads waited for, as after joining them."""
    _loaded().join_threads()


def launch_at(what: str, ranges: Iterable[tuple[int, int, bool]], device: str) -> None:
    """Report a kernel on the current stream of a device, by address, bytes and whether it writes."""
    stream = torch.accelerator.current_stream(torch.device(device))
    _loaded().launch_at(stream.device_index, stream.stream_id, what, list(ranges))


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory; who uses it is not recorded."""
    return _loaded().cpu_view(tensor)


def _loaded() -> Any:
    if _library is None:
        raise RuntimeError("call recording_device.load() first")
    return _library
