"""NCCL's communicators, reached through CuPy.

``NcclCommunicator`` takes addresses, counts of elements, torch's dtypes and reductions, and a stream's
handle; it takes no tensors and waits for no stream. Its calls release the GIL. A communicator lives until
``destroy`` or ``abort``, or until the interpreter ends. The garbage collector never frees it, because that
might block forever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fastcoll._load import C
from fastcoll.cuda import deadline, nccl_library
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_calls import DataCalls
from fastcoll.cuda.nccl_config import ConfiguredCommunicator, check_config, is_set
from fastcoll.cuda.nccl_init import connect, current
from fastcoll.cuda.nccl_library import IN_PROGRESS, NcclLibrary
from fastcoll.cuda.nccl_life import ABORT_SECONDS, born, died, keep, left_behind, let_go
from fastcoll.cuda.nccl_rendezvous import WHAT, Cancelled
from fastcoll.cuda.nccl_status import async_status, finish, settle

__all__ = ["NcclCommunicator"]

_log = logging.getLogger("fastcoll.cuda")


class NcclCommunicator(DataCalls):
    """One rank's communicator on one device.

    Make it with ``create`` or ``split``. Issue calls together inside ``with communicator.group():``. One thread
    at a time may make calls; only ``abort``, ``destroy`` and ``async_error`` may come from any thread, even while
    another thread is in a call.

    Attributes:
        member: Group, rank and size.
        device: Device of its buffers.
        library: The NCCL library that it calls.
        instance: A unique text, equal on all its ranks; "" after a split, until the engine sets it.
    """

    def __init__(
        self,
        raw: Any,
        member: Member,
        device: torch.device,
        timeout: float,
        library: NcclLibrary,
        instance: str = "",
    ) -> None:
        super().__init__(raw, member, timeout, library)
        self.device = device
        self.instance = instance
        self._forgotten = False
        self._ending: deadline.Call[None] | None = None
        self._lock = threading.Lock()
        keep(raw)
        born(self)

    @classmethod
    def create(
        cls,
        store: Store,
        *,
        group: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
        generation: int = 0,
        cancelled: Cancelled | None = None,
        config: C.NcclConfig | None = None,
    ) -> NcclCommunicator:
        """Makes a communicator, together with all other ranks of the group.

        Args:
            store: The group's store, common to all ranks.
            group: Name of the group, for errors and keys.
            rank: This process in the group.
            size: Number of ranks.
            device: The CUDA device of this rank.
            timeout: How long to wait for the other ranks.
            generation: How many communicators the ranks of this group have made before.
            cancelled: If another thread sets it, the wait ends with an error.
            config: NCCL config of the communicator, equal on all ranks.

        Raises:
            ImportError: CuPy or NCCL is missing; there are two copies of NCCL.
            DistBackendError: A rank did not arrive in time, or NCCL failed; the error names ranks and cause.
            DistStoreError: The store holds an entry that is not fastcoll's.
            ValueError: ``rank`` is not below ``size``, or this NCCL does not support the config.
        """
        member = Member(group, rank, size)
        if not 0 <= rank < size:
            raise ValueError(member.says(WHAT, f"expected a rank from 0 to {size - 1}, got {rank}"))
        library = nccl_library.load()
        seconds = timeout.total_seconds()
        raw, instance = connect(
            library, store, member, device, seconds, generation, cancelled, config
        )
        return cls(raw, member, device, seconds, library, instance)

    def split(
        self, color: int, key: int, group: str, config: C.NcclConfig | None = None
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
            DistBackendError: A rank did not arrive in time, which ends this communicator too, or NCCL failed.
            ValueError: ``color`` is below -1, or this NCCL does not support the config.
        """
        self._check("nccl_split")
        configured = config is not None and is_set(config)
        if config is not None:
            check_config(self.library, config)
        # CuPy loses a communicator whose split continues after the call has returned.
        returns_early = os.environ.get("NCCL_COMM_BLOCKING") == "0"
        own = ConfiguredCommunicator(self.library) if configured or returns_early else None
        if color < -1:
            raise ValueError(
                self.member.says("nccl_split", f"expected a color of at least -1, got {color}")
            )

        def divide() -> Any:
            with current(self.device):
                if own is None:
                    return self._raw.commSplit(color, key)
                return own.divide(self._raw.comm, color, key, config if configured else None)

        def late(what: str) -> dist.DistBackendError:
            return self.member.fault(
                "nccl_split", f"timed out after {self.timeout * 1000:.0f} ms: {what}"
            )

        end = time.monotonic() + self.timeout
        call = deadline.start(divide)
        try:
            if not call.wait(self.timeout):
                raise late(
                    "not all ranks of the group have split it. Call split on every rank, with color -1 where none is "
                    "wanted."
                )
            if own is not None:
                self._finish_split(own, color >= 0, call.result, end, late)
        except BaseException as error:
            if own is not None:
                keep(own)  # NCCL may still write its handle
                if own.comm:
                    deadline.start(own.abort).wait(ABORT_SECONDS)
            if self.ended_elsewhere is None:  # else its owner aborts it
                self.abort(str(error))
            raise
        if own is not None:
            part: Any = own if own.comm else None
        else:
            try:
                part = call.result()
            except Exception as error:
                raise self._translated("nccl_split", error) from None
        if part is None:
            return None
        with current(self.device):
            member = Member(group, part.rank_id(), part.size())
        return NcclCommunicator(part, member, self.device, self.timeout, self.library)

    def _finish_split(
        self,
        part: ConfiguredCommunicator,
        is_for_us: bool,
        result: Callable[[], object],
        end: float,
        late: Callable[[str], dist.DistBackendError],
    ) -> None:
        """Waits for a split that may continue after its call has returned, whatever its status.

        The status "in progress" is that of the whole communicator; when it ends, the part gets its handle.
        """
        where = self.library, self.member, "nccl_split"
        finish(*where, self._raw, result, end, late)
        settle(*where, self._raw, end, late)
        if is_for_us:
            while not part.comm:
                if time.monotonic() >= end:
                    raise late(
                        "NCCL has not made this rank's part. Set NCCL_DEBUG=INFO to see what it waits for."
                    )
                time.sleep(0.001)
            settle(*where, part, end, late)

    def async_error(self) -> dist.DistBackendError | None:
        """Returns the error that occurred after a call returned, or None; does not block."""
        with self._lock:  # keeps an abort from freeing it meanwhile
            if self._closed is not None:
                return self.member.fault("nccl", self._closed)
            try:
                status = async_status(self.library.cupy, self._raw)
            except Exception as error:
                return self.member.fault("nccl", str(error))
            if status in (0, IN_PROGRESS):
                return None
            return self.member.fault(
                "nccl", f"asynchronous error: {self.library.functions.describe(status)}"
            )

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
        return self._end("abort", reason, self._raw.abort, seconds)

    def destroy(self, seconds: float | None = None) -> bool:
        """Waits for the communicator's operations and ends it.

        Args:
            seconds: How long to wait for NCCL; None is ``ABORT_SECONDS``.

        Returns:
            Whether NCCL freed it in time. If not, it is left as it is, with a warning in the log.
        """
        return self._end("destroy", "the communicator was destroyed", self._destroy, seconds)

    def abort_at_exit(self) -> None:
        """Aborts, and returns when NCCL does; does nothing if an abort or destroy has begun."""
        with self._lock:
            busy = self._closed is not None
            self._closed = self._closed or "the process ends"
        self.calls.end()
        if not busy:
            self._raw.abort()

    def forget(self, reason: str) -> None:
        """Makes every later use raise, without a call of NCCL."""
        self._lock = threading.Lock()
        self._closed = reason
        self._forgotten = True

    def _destroy(self) -> None:
        with current(self.device):
            self._raw.destroy()

    def _end(
        self, what: str, reason: str, function: Callable[[], None], seconds: float | None
    ) -> bool:
        limit = ABORT_SECONDS if seconds is None else seconds
        with self._lock:
            if self._forgotten:
                return True
            if self._ending is None:
                self._closed = self._closed or reason
                self.calls.end()
                self._ending = deadline.start(function)
            call = self._ending
        if not call.wait(limit):
            _log.warning(left_behind(self.member, what, limit))
            return False
        if died(self):
            let_go(self._raw)
        call.result()
        return True
