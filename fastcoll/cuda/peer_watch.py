"""Looks after kernels that wait for peers: tells the watchdog of one that gave up, and ends those of a failed group.

A kernel waits on the device, where no watchdog sees it. Its limit of polls lies beyond the group's timeout, so that the
watchdog's deadline comes first and says how far every rank came. Then the group is aborted, and this thread lets
its kernels go: it marks the buffers as failed and sets all flags. One thread for all groups of the process, from the
first launch on; it reads two words of each region four times a second, by a stream of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fastcoll._load import C
from fastcoll.cuda.errors import Member

__all__ = ["PeerWatch", "watch"]

_log = logging.getLogger("fastcoll.cuda")

_TICK = 0.25  # seconds between two looks


class PeerWatch:
    """The kernels of one group on one device.

    Args:
        member: This rank.
        buffers: What they work in.
        aborted: Whether the group was aborted.
        report: Tells the watchdog of a fault.
    """

    def __init__(
        self,
        member: Member,
        buffers: Any,
        aborted: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self._member = member
        self._buffers = buffers
        self._aborted = aborted
        self._report = report
        self._launched = False
        self._over = False
        self._stream: torch.cuda.Stream | None = None

    def launched(self) -> None:
        """There is something to look after from now on."""
        if not self._launched:
            self._launched = True
            _wake.set()

    def look(self) -> bool:
        """Looks once, and returns whether there may be more to see."""
        if self._over or not self._launched:
            return False
        # Again and again: a peer that comes late sets its flag to a lower number.
        self._on_own_stream(self._let_go if self._aborted() else self._check)
        return not self._over

    def close(self) -> None:
        """Looks no more."""
        self._over = True

    def _check(self) -> None:
        from fastcoll.kernels.peers import PeerFault

        try:
            self._buffers.check()
        except PeerFault as fault:
            self._over = True
            self._report(self._member.says("all_reduce", str(fault)))

    def _let_go(self) -> None:
        buffers = self._buffers
        buffers.state[0, 0] = -1  # later launches touch nothing
        flags = buffers.memory[buffers.layout.flags_at : buffers.layout.staging_at]
        flags.view(torch.int64).fill_(1 << 62)

    def _on_own_stream(self, function: Callable[[], None]) -> None:
        """Beside the streams on which the kernels wait."""
        device = self._buffers.device
        if device.type != "cuda":
            function()
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            function()
            self._stream.synchronize()


_all: weakref.WeakSet[PeerWatch] = weakref.WeakSet()
_wake = threading.Event()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(watched: PeerWatch) -> None:
    """Looks after these kernels as long as the object lives."""
    global _thread
    with _starting:
        _all.add(watched)
        if _thread is None:
            _thread = threading.Thread(target=_run, daemon=True, name="fastcoll-peers")
            _thread.start()


def _run() -> None:
    C.leave_captures_alone()  # else a question here would end them
    while True:
        _wake.wait()
        _wake.clear()
        for watched in list(_all):
            try:
                if watched.look():
                    _wake.set()
            except Exception as error:  # of the driver: the watchdog hears of it too
                watched.close()
                _log.warning("fastcoll: the kernels between ranks are not looked after: %s", error)
            del watched
        time.sleep(_TICK)


def _forget_threads() -> None:
    """In a forked child no thread of the parent lives."""
    global _starting, _thread, _wake
    _starting, _thread, _wake = threading.Lock(), None, threading.Event()
    _all.clear()


os.register_at_fork(after_in_child=_forget_threads)
