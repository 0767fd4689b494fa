"""The communicators of this process: kept from the garbage collector, aborted at exit, unusable after a fork.

CuPy's communicator calls ncclCommDestroy when it is collected, which may block forever. So each one has an extra
reference that only its orderly end drops. When the interpreter ends, a thread aborts the live ones, and the process
waits for it only for a limited time. Before that, other threads stop making communicators: CPython unwinds such a
thread when it returns from C++, and C++ takes the unwinding for an error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastcoll.cuda import deadline
from fastcoll.cuda.errors import Member

if TYPE_CHECKING:
    from fastcoll.cuda.nccl import NcclCommunicator

__all__ = [
    "ABORT_SECONDS",
    "DESTROY_SECONDS",
    "ENDING_SECONDS",
    "decref",
    "incref",
    "is_ending",
    "left_behind",
    "making",
    "register_communicator",
    "unregister_communicator",
]

ABORT_SECONDS = 2.0
"""How long to wait for an abort, which may hang in NCCL."""

DESTROY_SECONDS = 10.0
"""How long to wait for the destruction of all communicators of a group; one over 16 GPUs takes seconds.

After this time each remaining one gets ABORT_SECONDS."""

ENDING_SECONDS = 1.0
"""How long the interpreter's end waits for threads that are making communicators."""

_lock = threading.Lock()
_living: list[NcclCommunicator] = []
_ending = threading.Event()
_making = 0  # threads
_made = threading.Condition(_lock)


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Makes the interpreter's end wait for this thread, which must poll ``is_ending``."""
    global _making
    with _lock:
        _making += 1
    try:
        yield
    finally:
        with _lock:
            _making -= 1
            _made.notify_all()


def is_ending() -> bool:
    """Whether the interpreter is ending."""
    return _ending.is_set()


def incref(raw: Any) -> None:
    """Keeps a communicator's object from being collected, even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))


def decref(raw: Any) -> None:
    """Undoes ``incref``, once the object's collection would destroy nothing."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(raw))


def left_behind(member: Member, what: str, seconds: float) -> str:
    """Returns the log text for a communicator that NCCL has not freed."""
    return member.message(
        f"nccl_{what}",
        f"NCCL has not freed the communicator within {seconds:g} s; it is left to the end of the process. CUDA graphs "
        "that captured calls on it keep it: delete them before the group is destroyed.",
    )


def register_communicator(one: NcclCommunicator) -> None:
    """Records a communicator."""
    with _lock:
        _living.append(one)


def unregister_communicator(one: NcclCommunicator) -> bool:
    """Removes a communicator's record; returns whether there was one."""
    with _lock:
        if one not in _living:
            return False
        _living.remove(one)
        return True


def _abort_all() -> None:
    _ending.set()
    with _lock:
        _made.wait_for(lambda: not _making, ENDING_SECONDS)
        living = list(_living)
        _living.clear()
    if not living:
        return

    def abort() -> None:
        for one in living:
            one.abort_at_exit()

    try:
        deadline.start(abort).wait(ABORT_SECONDS)
    except RuntimeError:
        return  # no thread is left; the end of the process frees everything


def _forget_all() -> None:
    global _lock, _made, _making
    _lock = threading.Lock()
    _made, _making = threading.Condition(_lock), 0
    reason = (
        f"this process was forked from {os.getppid()}, and NCCL's communicators do not pass a fork. Start processes "
        'by "spawn" or "forkserver", or make the group after the fork.'
    )
    for one in _living:
        one.forget(reason)
    _living.clear()


atexit.register(_abort_all)
os.register_at_fork(after_in_child=_forget_all)
