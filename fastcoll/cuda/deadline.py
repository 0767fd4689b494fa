"""Calls that may never return, each made on a thread that the process does not wait for.

NCCL's init, split, destroy and abort block, possibly forever. They run here, so the caller can stop waiting and the
interpreter can end.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

__all__ = ["Call", "start"]

Value = TypeVar("Value")


class Call(futures.Future[Value]):
    """A function that runs on another thread; ``wait`` for it before its ``result``."""

    def __init__(self, function: Callable[[], Value]) -> None:
        super().__init__()
        self._function = function

    def run(self) -> None:
        """Calls the function; keeps its exception for ``result``."""
        try:
            value = self._function()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(value)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the function; returns whether it has ended."""
        return bool(futures.wait([self], max(0.0, seconds)).done)


class _Worker(threading.Thread):
    """A thread for one call at a time; after it, it is free for the next."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="fastcoll-nccl")
        self.calls: queue.SimpleQueue[Call[object]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            call = self.calls.get()
            call.run()
            del call  # frees what its function holds
            with _lock:
                _free.append(self)


_lock = threading.Lock()
_free: list[_Worker] = []


def start(function: Callable[[], Value]) -> Call[Value]:
    """Starts a function on a thread.

    Each call leaves a free thread behind for ``atexit`` handlers, because an interpreter that is ending starts no
    threads.

    Raises:
        RuntimeError: The interpreter is ending, and no thread is free.
    """
    call = Call(function)
    with _lock:
        worker = _free.pop() if _free else None
        lonely = not _free
    (worker or _Worker()).calls.put(call)  # type: ignore[arg-type]
    if lonely:
        try:
            spare = _Worker()
        except RuntimeError:  # the interpreter is ending
            return call
        with _lock:
            _free.append(spare)
    return call


def _forget_threads() -> None:
    """Resets the pool in a forked child, which has none of the parent's threads."""
    global _lock
    _lock = threading.Lock()
    _free.clear()


os.register_at_fork(after_in_child=_forget_threads)
