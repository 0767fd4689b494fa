"""Calls that may never return, each made on a thread that the process does not wait for.

NCCL's init, split, destroy and abort block, and can do so for good. They run here, so that the caller can
stop waiting, and so that the interpreter can end.
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
        """Calls the function; its exception waits for ``result``."""
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Returns whether the function has ended, waiting for it so long."""
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
            del call  # and what its function holds
            with _lock:
                _free.append(self)


_lock = threading.Lock()
_free: list[_Worker] = []


def start(function: Callable[[], Value]) -> Call[Value]:
    """Starts a function on a thread.

    Each call leaves a free thread behind, because from its end on an interpreter starts none: so what the
    handlers of ``atexit`` do here has one too.

    Raises:
        RuntimeError: The interpreter ends, and no thread is free.
    """
    call = Call(function)
    with _lock:
        worker = _free.pop() if _free else None
        lonely = not _free
    (worker or _Worker()).give(call)  # type: ignore[arg-type]
    if lonely:
        try:
            spare = _Worker()
        except RuntimeError:  # the interpreter ends
            return call
        with _lock:
            _free.append(spare)
    return call


def _forget_threads() -> None:
    """In a forked child no thread of the parent lives."""
    global _lock
    _lock = threading.Lock()
    _free.clear()


os.register_at_fork(after_in_child=_forget_threads)
