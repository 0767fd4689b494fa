"""NCCL's communicators. CuPy makes a group's first one; parts, and those with a config, are made by NCCL's functions.

C++ makes the calls that move data (csrc/cuda/nccl.cpp). A communicator lives until ``destroy`` or ``abort``, or until
the interpreter ends. The garbage collector never frees it, because that might block forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._load_cuda import CUDA
from fastcoll.cuda import deadline
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_config import LibraryCommunicator, NcclConfig, check_config
from fastcoll.cuda.nccl_library import (
    IN_PROGRESS,
    NcclLibrary,
    StatusError,
    finish,
    settle,
    translated,
)
from fastcoll.cuda.nccl_life import (
    ABORT_SECONDS,
    decref,
    incref,
    left_behind,
    register_communicator,
    unregister_communicator,
)

__all__ = ["NcclCommunicator", "current"]

_log = logging.getLogger("fastcoll.cuda")

_SYMMETRIC = 1  # NCCL's flag for a window that all ranks use at the same offset
_POLL = 0.001  # seconds between two polls of a handle that NCCL will write


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a CUDA device current on this thread; NCCL's init and destroy use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(eq=False, repr=False)
class NcclCommunicator:
    """One rank's communicator on one device.

    Make it with ``nccl_init.create_communicator`` or ``split``. One thread at a time may make calls; only ``abort`` and
    ``destroy`` may come from any thread, even while another thread is in a call.

    Attributes:
        raw: CuPy's communicator, or a ``LibraryCommunicator``.
        member: Group, rank and size.
        device: Device of its buffers.
        timeout: Seconds that a split waits for the other ranks, and that a call of a nonblocking communicator may stay
            in progress.
        library: The NCCL library to call.
        instance: A unique text, equal on all its ranks; "" after a split, until the engine sets it.
        calls: The calls that move data, for C++.
        ended_elsewhere: Returns why the communicator has ended, if another object aborted it.
        family: The group's communicators, which share NCCL's resources if any do; the engine sets it.
    """

    raw: Any
    member: Member
    device: torch.device
    timeout: float
    library: NcclLibrary
    instance: str = ""

    def __post_init__(self) -> None:
        handle, timeout = int(self.raw.comm), timedelta(seconds=self.timeout)
        self.calls = CUDA.NcclCalls(self.library.functions, handle, self.member.size, timeout)
        self.ended_elsewhere: Callable[[], str | None] | None = None
        self.family: CUDA.Communicators | None = None
        self._closed: str | None = None
        self._forgotten = False
        self._ending: deadline.Call[None] | None = None
        self._lock = threading.Lock()
        incref(self.raw)
        register_communicator(self)

    @property
    def closed(self) -> str | None:
        """Why the communicator has ended; None while it lives."""
        if self._closed is None and self.ended_elsewhere is not None:
            return self.ended_elsewhere()
        return self._closed

    def register(self, address: int, size: int, symmetric: bool = False) -> int:
        """Registers device memory, which NCCL then need not copy; returns the handle for ``deregister``.

        Args:
            address: Where the memory begins; for a window a multiple of 4096.
            size: In bytes.
            symmetric: Whether as a window: all ranks register together and use the same offset in every call.

        Raises:
            DistBackendError: NCCL failed.
        """
        self._check("nccl_register")
        place = ctypes.c_void_p()
        name, flags = (
            ("ncclCommWindowRegister", [_SYMMETRIC]) if symmetric else ("ncclCommRegister", [])
        )
        try:
            self.library.call(name, self.raw.comm, address, size, ctypes.byref(place), *flags)
        except StatusError as error:
            if error.status != IN_PROGRESS:
                raise self._translated("nccl_register", error) from None
            while not place.value and self.closed is None:  # NCCL writes it on completion
                time.sleep(_POLL)
        self._check("nccl_register")
        return place.value or 0

    def deregister(self, registration: int, symmetric: bool = False) -> None:
        """Undoes a registration; call it before its memory is freed.

        Raises:
            DistBackendError: NCCL failed.
        """
        self._check("nccl_deregister")
        name = "ncclCommWindowDeregister" if symmetric else "ncclCommDeregister"
        try:
            self.library.call(name, self.raw.comm, registration)
        except StatusError as error:
            raise self._translated("nccl_deregister", error) from None

    def split(
        self, color: int, key: int, group: str, config: NcclConfig | None = None
    ) -> NcclCommunicator | None:
        """Splits the communicator; all ranks call it.

        Args:
            color: Ranks with the same color, at least 0, share a new communicator; -1: none for this rank.
            key: Orders the ranks in the new communicator; ranks with equal keys keep their order.
            group: Name of this rank's part.
            config: NCCL config of the part; if no field is set, the config of this communicator.

        Returns:
            The communicator of this rank's part, or None for -1.

        Raises:
            DistBackendError: A rank did not arrive in time, or NCCL failed; abort this communicator then.
            ValueError: ``color`` is below -1, or this NCCL does not support the config.
        """
        self._check("nccl_split")
        check_config(self.library, config)
        if color < -1:
            raise ValueError(
                self.member.message("nccl_split", f"expected a color of at least -1, got {color}")
            )
        part = LibraryCommunicator(self.library)
        where = self.library, self.member, "nccl_split"
        end = time.monotonic() + self.timeout

        def divide() -> None:
            self.make_part(part, color, key, config)

        def late(what: str) -> dist.DistBackendError:
            return self.member.fault(
                "nccl_split", f"timed out after {self.timeout * 1000:.0f} ms: {what}"
            )

        call = deadline.start(divide)
        try:
            if not call.wait(self.timeout):
                raise late(
                    "not all ranks of the group have split it. Call split on every rank, with color -1 where none is "
                    "wanted."
                )
            finish(*where, call.result)
            self.await_part("nccl_split", part if color >= 0 else None, end, late)
            if color >= 0:
                rank = self.library.number("ncclCommUserRank", part.comm)
                member = Member(group, rank, self.library.number("ncclCommCount", part.comm))
        except BaseException as error:
            incref(part)  # NCCL may still write its handle
            if part.comm and call.wait(0):  # an abort might free what a running split still uses
                deadline.start(part.abort).wait(ABORT_SECONDS)
            if isinstance(error, dist.DistBackendError):
                self._check("nccl_split")  # after an abort, its reason is the error to raise
            raise
        if color < 0:
            return None
        return NcclCommunicator(part, member, self.device, self.timeout, self.library)

    def make_part(
        self, part: LibraryCommunicator, color: int, key: int, config: NcclConfig | None
    ) -> None:
        """Begins a split; ``await_part`` waits for its end."""
        with current(self.device):
            part.make_part(self.raw.comm, color, key, config)

    def await_part(
        self,
        what: str,
        part: LibraryCommunicator | None,
        end: float,
        late: Callable[[str], dist.DistBackendError],
    ) -> None:
        """Waits for a split, which may continue after its call has returned, whatever its status.

        "In progress" is then the status of the whole communicator; when it ends, the part gets its handle.

        Args:
            what: Name of the failed call in errors.
            part: This rank's part; None if it has none.
            end: When to stop waiting, on the clock of ``time.monotonic``.
            late: Makes the error for a wait that timed out.
        """
        where = self.library, self.member, what
        check = functools.partial(self._check, what)
        settle(*where, self.raw.comm, end, late, check)
        if part is None:
            return
        while not part.comm:
            check()
            if time.monotonic() >= end:
                raise late(
                    "NCCL has not made this rank's part. Set NCCL_DEBUG=INFO to see what it waits for."
                )
            time.sleep(_POLL)
        settle(*where, part.comm, end, late, check)

    def abort(
        self, reason: str = "the communicator was aborted", seconds: float | None = None
    ) -> bool:
        """Ends the communicator and all calls on it, in all threads.

        Args:
            reason: Text of the error that later calls raise.
            seconds: How long to wait for NCCL; None is ``ABORT_SECONDS``.

        Returns:
            Whether NCCL freed it in time. If not, it is left as it is, with a warning in the log. That is also the
            case if an earlier ``destroy`` hangs.
        """
        return self._end("abort", reason, self.raw.abort, seconds)

    def destroy(self, seconds: float | None = None) -> bool:
        """Waits for the communicator's operations and ends it; `seconds` and the result are as for ``abort``."""

        def destroy() -> None:
            with current(self.device):
                self.raw.destroy()

        return self._end("destroy", "the communicator was destroyed", destroy, seconds)

    def abort_at_exit(self) -> None:
        """Aborts, and returns when NCCL does; does nothing if an abort or destroy has begun."""
        with self._lock:
            busy = self.closed is not None  # the watchdog's abort counts too
            self._closed = self._closed or "the process ends"
        self.calls.end()
        if not busy:
            self.raw.abort()

    def forget(self, reason: str) -> None:
        """Makes every later use raise, without a call of NCCL."""
        self._lock = threading.Lock()
        self._closed = reason
        self._forgotten = True
        self.calls.end()

    def _end(
        self, what: str, reason: str, function: Callable[[], None], seconds: float | None
    ) -> bool:
        limit = ABORT_SECONDS if seconds is None else seconds
        with self._lock:
            aborted_elsewhere = self._closed is None and self.closed is not None
            if self._forgotten or aborted_elsewhere:  # its memory is freed
                return True
            if self._ending is None:
                self._closed = self._closed or reason
                self.calls.end()
                self._ending = deadline.start(function)
            call = self._ending
        if not call.wait(limit):
            _log.warning(left_behind(self.member, what, limit))
            return False
        if unregister_communicator(self):
            decref(self.raw)
        call.result()
        return True

    def _check(self, what: str) -> None:
        if (closed := self.closed) is not None:
            raise self.member.fault(what, closed)

    def _translated(self, what: str, error: Exception) -> Exception:
        if (closed := self.closed) is not None:
            return self.member.fault(what, closed)
        return translated(self.library, self.member, what, error)
