"""A device without a GPU that proves the order of streams.

``load()`` makes torch's PrivateUse1 the device ``recording``: two devices with host memory. Operators run
at once, on CPU. Streams, events and the caching allocator are modelled: which work is ordered with which,
and what the host waited for. An access to memory without an order is a violation, even if it happened to
come after the other access.

Call ``load()`` before the first backward of the process, because autograd starts its threads then.
Ranks of the fixture ``device_world`` have loaded it.

The model:

- A kernel is ordered after earlier launches of its stream, and after work that the stream or the
  launching host thread waited for. A wait of one host thread does not count for another one, unless
  that one was started later or runs backward for the first. ``join_threads()`` makes all such waits
  count for the calling thread.
- Memory belongs to the stream that was current when it was made. If another stream uses it, its work
  must be ordered after earlier work of the owner. When the memory is freed, that work must be ordered
  before it, or recorded by ``record_stream``.
- ``.cpu()``, ``.item()`` and all else that needs a value or a size on the host waits for the stream;
  copies with ``non_blocking=True`` do not. Host memory itself is not checked.
- ``hold(stream)``: later launches on the stream are unfinished until ``release``, and so is all work that
  waits for them: ``query()`` returns False, and a synchronize waits. A stream that is never released
  hangs.

Native libraries report their accesses through the C interface in ``csrc/c_interface.cpp``.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import torch_module
from ._build import build, load_library

_library: types.ModuleType | None = None


def load() -> None:
    """Make ``recording`` a device of this process; do nothing if it is one already.

    Raises:
        RuntimeError: autograd has already run in this process, so it has no threads for this device.
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
    """Return the violations in order; each has ``kind``, ``text``, ``first`` and ``second``.

    Kinds are "race", "freed early", "not device memory" and "unknown stream". Both sides have
    ``what``, ``stream``, ``address``, ``bytes`` (those that both touch) and ``write``.
    """
    return _loaded().violations()


def log(*kinds: str, stream: torch.Stream | None = None) -> list[Any]:
    """Return the log in order; only the entries of these kinds and this stream, if given.

    Kinds are launch, allocate, free, record, block, query, synchronize, record_stream, hold and
    release. Entries have ``kind``, ``what``, ``stream`` (its ``name_of``), ``event`` (a number,
    0 for none), ``thread`` (a number) and ``touches``, the memory concerned.
    """
    return [
        entry
        for entry in _loaded().log()
        if (not kinds or entry.kind in kinds)
        and (stream is None or entry.stream == name_of(stream))
    ]


def clear() -> None:
    """Forget violations, log and past accesses to memory; release all streams."""
    _loaded().clear()


@contextlib.contextmanager
def no_violations() -> Iterator[None]:
    """Do as ``clear`` does, and raise AssertionError for violations found inside."""
    clear()
    yield
    if found := violations():
        raise AssertionError("\n".join([f"{len(found)} violations:", *map(repr, found)]))


def name_of(stream: torch.Stream) -> str:
    """Return the stream's name in log and violations, like "recording:0 high 3"."""
    return _loaded().name_of(stream.device_index, stream.stream_id)


def hold(stream: torch.Stream) -> int:
    """Leave later launches on the stream unfinished; return the token for ``release``.

    Holds of one stream may overlap: work is finished when the holds before it are released.
    """
    return _loaded().hold(stream.device_index, stream.stream_id)


def release(token: int) -> None:
    """End one hold."""
    _loaded().release(token)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold the stream inside the block."""
    token = hold(stream)
    try:
        yield
    finally:
        release(token)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Record and check no kernels and events inside the block, to measure what a call costs the host."""
    _loaded().set_quiet(True)
    try:
        yield
    finally:
        _loaded().set_quiet(False)


def add_symmetric_memory() -> None:
    """Register symmetric memory for the device in torch; it maps nothing."""
    _loaded().add_symmetric_memory()


@contextlib.contextmanager
def held_rendezvous() -> Iterator[None]:
    """Make symmetric memory's rendezvous and free wait inside the block, as for a missing peer or a busy device."""
    _loaded().hold_rendezvous(True)
    try:
        yield
    finally:
        _loaded().hold_rendezvous(False)


def switches_seen() -> list[str]:
    """Return the last rendezvous's environment switches: overlapping devices, no multicast; "" if unset."""
    return _loaded().switches_seen()


def most_at_once() -> int:
    """Return how many rendezvous ran at the same time, at most, since the last hold."""
    return _loaded().most_at_once()


def join_threads() -> None:
    """Make other threads' waits count for the calling thread, as after joining them."""
    _loaded().join_threads()


def launch_at(what: str, ranges: Iterable[tuple[int, int, bool]], device: str) -> None:
    """Report a kernel on a device's current stream; ranges are address, bytes and whether it writes."""
    stream = torch.accelerator.current_stream(torch.device(device))
    _loaded().launch_at(stream.device_index, stream.stream_id, what, list(ranges))


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory; its uses are not recorded."""
    return _loaded().cpu_view(tensor)


def _loaded() -> Any:
    if _library is None:
        raise RuntimeError("call recording_device.load() first")
    return _library
