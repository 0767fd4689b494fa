"""The communicators of this process: kept from the garbage collector, aborted at exit, useless after a fork.

CuPy's communicator calls ncclCommDestroy when it is collected, which may block for good. So each one is kept
by a reference that nothing but its orderly end takes back, and those that live when the interpreter ends are
aborted, for a limited time, by a thread that is not waited for longer. Those that other threads are making then are
given up before: CPython ends such a thread when it comes back from C++, by an unwinding that C++ takes for an error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from fastcoll.cuda import deadline
from fastcoll.cuda.errors import Member

__all__ = [
    "ABORT_SECONDS",
    "DESTROY_SECONDS",
    "ENDING_SECONDS",
    "Living",
    "born",
    "died",
    "is_ending",
    "keep",
    "left_behind",
    "let_go",
    "making",
]

ABORT_SECONDS = 2.0
"""How long is waited for an abort, which in NCCL may hang."""

DESTROY_SECONDS = 10.0
"""The same for the destruction of a group's communicators together; of 16 GPUs one takes seconds.

Those whose turn comes when it is over have ABORT_SECONDS each."""


class Living(Protocol):
    """What is told of the end of the process, and of a fork."""

    def abort_at_exit(self) -> None:
        """Aborts, and returns when NCCL does."""

    def forget(self, reason: str) -> None:
        """Makes every use an error, without a call of NCCL."""


ENDING_SECONDS = 1.0
"""How long the interpreter's end waits for threads that are making communicators."""

_lock = threading.Lock()
_living: list[Living] = []
_ending = threading.Event()
_making = 0  # threads
_made = threading.Condition(_lock)


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Has the interpreter's end wait for this thread, which looks at ``is_ending``."""
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
    """Whether the interpreter ends."""
    return _ending.is_set()


def keep(raw: Any) -> None:
    """Keeps an object of CuPy's from being collected, also at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))


def let_go(raw: Any) -> None:
    """Takes ``keep`` back, when the object has nothing left that its collection would destroy."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(raw))


def left_behind(member: Member, what: str, seconds: float) -> str:
    """Returns what the log says of a communicator that NCCL does not let go."""
    return member.says(
        f"nccl_{what}",
        f"NCCL has not freed the communicator within {seconds:g} s; it is left to the end of the process. CUDA graphs "
        "that captured calls on it keep it: delete them before the group is destroyed.",
    )


def born(one: Living) -> None:
    """Notes a communicator."""
    with _lock:
        _living.append(one)


def died(one: Living) -> bool:
    """Strikes a communicator off; returns whether it was still noted."""
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
        return  # no thread is left to do it: the end of the process frees all


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
