"""Calls that may never return, each made on a thread that the process does not wait for.

NCCL's init, split, destroy and abort block, possibly forever. They run here, so the caller can stop waiting and the
interpreter can end.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Call", "start"]

Value = TypeVar("Value")


class Call(Generic[Value]):
    """A function that runs on another thread."""

    def __init__(self, function: Callable[[], Value]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: list[Value] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Calls the function; keeps its exception for ``result``."""
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the function; returns whether it has ended."""
        return self._done.wait(max(0.0, seconds))

    def result(self) -> Value:
        """Returns the value of a function that has ended, or raises what it raised."""
        if not self._done.is_set():
            raise RuntimeError("fastcoll.cuda: the call has not ended; wait for it first")
        if self._error is not None:
            raise self._error
        return self._value[0]


class _Worker(threading.Thread):
    """A thread for one call at a time; after it, it is free for the next."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="fastcoll-nccl")
        self._calls: queue.SimpleQueue[Call[object]] = queue.SimpleQueue()
        self.start()

    def give(self, call: Call[object]) -> None:
        self._calls.put(call)

    def run(self) -> None:
        while True:
            call = self._calls.get()
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
    (worker or _Worker()).give(call)  # type: ignore[arg-type]
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
