"""The trace of a process that runs or hangs. The process takes no part in the read, and sees nothing of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fastcoll.trace.contents import Trace
from fastcoll.trace.memory import dump_of, load, owner_of

__all__ = ["NoTraceError", "copy", "read", "traced_processes"]

_LINK = "/memfd:trace.fastcoll"


class NoTraceError(ValueError):
    """The process has made no group."""


def traced_processes() -> Iterator[int]:
    """Yields the processes of this user that have a trace; by pid, ascending."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if _descriptors(pid):
                yield pid
        except OSError:  # it has ended, or is another user's
            continue


def read(pid: int, newest: int | None = None) -> Trace:
    """Returns the trace of a process of this host.

    Args:
        pid: The process.
        newest: How many of the newest records to read; all by default.

    Raises:
        ProcessLookupError: There is no such process.
        PermissionError: It is another user's.
        NoTraceError: It has no trace.
        ValueError: Another version of fastcoll made the trace.
    """
    with _memory_of(pid) as memory:
        return replace(load(memory, newest), pid=pid)


def copy(pid: int, reason: str) -> bytes:
    """Returns a dump of a process of this host; see ``read`` for the errors.

    Args:
        pid: The process.
        reason: Why it is made, for the report.
    """
    with _memory_of(pid) as memory:
        return dump_of(memory, reason)


@contextmanager
def _memory_of(pid: int) -> Iterator[mmap.mmap]:
    try:
        paths = _descriptors(pid)
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    except PermissionError:
        raise PermissionError(
            f"process {pid} belongs to another user, or is protected. Run this as the user of the job."
        ) from None
    own = _pid_in_namespace(pid)
    for path in paths:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        ):
            if owner_of(memory) == own:  # a forked child has its parent's descriptor too
                yield memory
                return
    raise NoTraceError(
        f"process {pid} has no trace: it has made no group of fastcoll, or FASTCOLL_TRACE_SIZE is 0"
    )


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith(_LINK):
                found.append(f"{folder}/{name}")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def _pid_in_namespace(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid
