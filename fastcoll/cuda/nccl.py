"""NCCL's communicators, reached through CuPy.

:class:`NcclCommunicator` takes addresses, counts of elements, torch's dtypes and reductions, and a stream's
handle; it knows no tensors and waits for no stream. Its calls release the GIL. A communicator lives until
``destroy`` or ``abort``, or until the interpreter ends: it is never freed by the garbage collector, which
might block for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fastcoll.cuda import deadline, nccl_library
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_init import connect, current
from fastcoll.cuda.nccl_library import IN_PROGRESS, NcclLibrary, StatusError
from fastcoll.cuda.nccl_life import ABORT_SECONDS, born, died, keep, left_behind, let_go
from fastcoll.cuda.nccl_reductions import PreMulSums
from fastcoll.cuda.nccl_rendezvous import WHAT
from fastcoll.cuda.nccl_status import async_status, finish, said, status_of, translated
from fastcoll.cuda.nccl_types import PREMUL_SUM, Reduction, moved, reduced

__all__ = ["NcclCommunicator", "group"]

_log = logging.getLogger("fastcoll.cuda")


class NcclCommunicator:
    """One rank's communicator on one device.

    Make it with :meth:`create` or :meth:`split`. Calls that are issued together go between
    ``with communicator.group():``. All calls but ``abort``, ``destroy`` and ``async_error`` belong to one
    thread at a time; these three may come from any thread, also while another is in a call.

    Attributes:
        member: Group, rank and size.
        device: Where its buffers lie.
        library: The NCCL behind it.
        instance: Equal on all its ranks and no other communicator's; "" for one made by a split.
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
        self.member = member
        self.device = device
        self.library = library
        self.instance = instance
        self._raw = raw
        self._timeout = timeout
        self._closed: str | None = None
        self._forgotten = False
        self._ending: deadline.Call[None] | None = None
        self._lock = threading.Lock()
        self._factors = PreMulSums(library)
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
        cancelled: threading.Event | None = None,
    ) -> NcclCommunicator:
        """Makes a communicator, together with all other ranks of the group.

        Args:
            store: The group's; all ranks see the same.
            group: Its name, for messages and keys.
            rank: This process in the group.
            size: Number of ranks.
            device: The CUDA device of this rank.
            timeout: How long to wait for the other ranks.
            generation: How many communicators the ranks of this group have made before.
            cancelled: When set, by another thread, the waiting ends with an error.

        Raises:
            ImportError: CuPy or NCCL is missing; there are two copies of NCCL.
            DistBackendError: A rank has not come in time, or NCCL failed; the message names ranks and cause.
            DistStoreError: What the store holds is none of ours.
            ValueError: ``rank`` is not one of ``size``.
        """
        member = Member(group, rank, size)
        if not 0 <= rank < size:
            raise ValueError(member.says(WHAT, f"expected a rank from 0 to {size - 1}, got {rank}"))
        library = nccl_library.load()
        seconds = timeout.total_seconds()
        raw, instance = connect(library, store, member, device, seconds, generation, cancelled)
        return cls(raw, member, device, seconds, library, instance)

    @property
    def handle(self) -> int:
        """The address of NCCL's own object, for functions of NCCL that are called by address.

        Raises:
            DistBackendError: The communicator is aborted or destroyed.
        """
        self._check("handle")
        return int(self._raw.comm)

    @property
    def closed(self) -> str | None:
        """Why the communicator is no more; None while it lives."""
        return self._closed

    def split(self, color: int, key: int, group: str) -> NcclCommunicator | None:
        """Divides the ranks; all ranks call it.

        Args:
            color: Ranks with the same one, at least 0, share a communicator; -1 is for none.
            key: Orders the ranks in it; where equal, their order here does.
            group: Name of this rank's part.

        Returns:
            The communicator of this rank's part, or None for -1.

        Raises:
            DistBackendError: A rank has not come in time, which ends this communicator too, or NCCL failed.
            ValueError: ``color`` is below -1.
        """
        self._check("nccl_split")
        if color < -1:
            raise ValueError(
                self.member.says("nccl_split", f"expected a color of at least -1, got {color}")
            )

        def divide() -> Any:
            with current(self.device):
                return self._raw.commSplit(color, key)

        call = deadline.start(divide)
        try:
            if not call.wait(self._timeout):
                raise self.member.fault(
                    "nccl_split",
                    f"timed out after {self._timeout * 1000:.0f} ms: not all ranks of the group have split it. "
                    "Call split on every rank, with color -1 where none is wanted.",
                )
        except BaseException as error:
            self.abort(str(error))
            raise
        try:
            part = call.result()
        except Exception as error:
            if status_of(self.library.cupy, error) == IN_PROGRESS:
                raise self.member.fault(
                    "nccl_split",
                    "CuPy cannot split communicators that do not block. Unset NCCL_COMM_BLOCKING.",
                ) from None
            raise self._translated("nccl_split", error) from None
        if part is None:
            return None
        member = Member(group, part.rank_id(), part.size())
        return NcclCommunicator(part, member, self.device, self._timeout, self.library)

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: torch.dtype, op: Any, stream: int
    ) -> None:
        """Reduces ``count`` elements of all ranks into ``receive``, which may be ``send``.

        Args:
            send: Address of this rank's elements.
            receive: Address of the result.
            count: Elements.
            dtype: Theirs.
            op: A ``dist.ReduceOp`` or one of its names; AVG is NCCL's own and truncates integers.
            stream: Handle of the CUDA stream.

        Raises:
            TypeError: NCCL has no such reduction of this dtype.
            DistBackendError: NCCL failed.
        """
        kind, number = self._reduction("all_reduce", dtype, op)
        args = (send, receive, count * kind.parts, kind.code, number, stream)
        self._call("all_reduce", self._raw.allReduce, args)

    def reduce(
        self,
        send: int,
        receive: int,
        count: int,
        dtype: torch.dtype,
        op: Any,
        root: int,
        stream: int,
    ) -> None:
        """Like :meth:`all_reduce`, with the result on ``root`` alone; elsewhere ``receive`` may be 0."""
        kind, number = self._reduction("reduce", dtype, op)
        args = (send, receive, count * kind.parts, kind.code, number, root, stream)
        self._call("reduce", self._raw.reduce, args)

    def reduce_scatter(
        self, send: int, receive: int, count: int, dtype: torch.dtype, op: Any, stream: int
    ) -> None:
        """Reduces ``count`` elements for each rank, ``size * count`` in all, and leaves each its own."""
        kind, number = self._reduction("reduce_scatter", dtype, op)
        args = (send, receive, count * kind.parts, kind.code, number, stream)
        self._call("reduce_scatter", self._raw.reduceScatter, args)

    def broadcast(
        self, send: int, receive: int, count: int, dtype: torch.dtype, root: int, stream: int
    ) -> None:
        """Copies ``count`` elements at ``send`` on ``root`` to ``receive`` on all ranks.

        Args:
            send: Address of the elements; elsewhere than on ``root`` it may be 0.
            receive: Address of the copy; on ``root`` it may be ``send``.
            count: Elements.
            dtype: Theirs; any.
            root: The rank that has them.
            stream: Handle of the CUDA stream.

        Raises:
            DistBackendError: NCCL failed.
        """
        kind = moved(dtype)
        args = (send, receive, count * kind.parts, kind.code, root, stream)
        self._call("broadcast", self._raw.broadcast, args)

    def all_gather(
        self, send: int, receive: int, count: int, dtype: torch.dtype, stream: int
    ) -> None:
        """Copies every rank's ``count`` elements, in rank order, to ``receive`` on all ranks."""
        kind = moved(dtype)
        args = (send, receive, count * kind.parts, kind.code, stream)
        self._call("all_gather", self._raw.allGather, args)

    def send(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Sends ``count`` elements to a rank, which calls :meth:`receive` with the same count and dtype."""
        kind = moved(dtype)
        args = (address, count * kind.parts, kind.code, peer, stream)
        self._call("send", self._raw.send, args)

    def receive(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Receives what ``peer`` sends."""
        kind = moved(dtype)
        args = (address, count * kind.parts, kind.code, peer, stream)
        self._call("recv", self._raw.recv, args)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Issues the calls of its body together; sends and receives in any order.

        When the body raises, none of them is issued. Groups may be nested: the outermost issues.

        Raises:
            DistBackendError: NCCL failed.
        """
        with group(self):
            yield

    def register(self, address: int, size: int) -> int:
        """Registers ``size`` bytes of device memory; returns what :meth:`deregister` takes.

        Raises:
            DistBackendError: NCCL failed.
        """
        with self._translating("nccl_register"):
            return self.library.register(self.handle, address, size)

    def deregister(self, registration: int) -> None:
        """Takes a registration back, before its memory is freed.

        Raises:
            DistBackendError: NCCL failed.
        """
        with self._translating("nccl_deregister"):
            self.library.deregister(self.handle, registration)

    def async_error(self) -> dist.DistBackendError | None:
        """Returns what has gone wrong since the calls returned, or None; it does not block."""
        with self._lock:  # no abort frees it meanwhile
            if self._closed is not None:
                return self.member.fault("nccl", self._closed)
            try:
                status = async_status(self.library.cupy, self._raw)
            except Exception as error:
                return self.member.fault("nccl", str(error))
            if status in (0, IN_PROGRESS):
                return None
            return self.member.fault("nccl", f"asynchronous error: {said(self.library, status)}")

    def abort(self, reason: str = "the communicator was aborted") -> bool:
        """Ends the communicator and all calls on it, in whatever thread they are.

        Args:
            reason: What every later call raises.

        Returns:
            Whether NCCL has freed it. If it has not within :data:`ABORT_SECONDS`, it is left as it is, with a
            warning in the log; so it is when :meth:`destroy` was called before and hangs.
        """
        return self._end("abort", reason, self._raw.abort)

    def destroy(self) -> bool:
        """Waits for the communicator's operations and ends it.

        Returns:
            Whether NCCL has freed it. If it has not within :data:`ABORT_SECONDS`, it is left as it is, with a
            warning in the log.
        """
        return self._end("destroy", "the communicator was destroyed", self._destroy)

    def abort_at_exit(self) -> None:
        """Aborts, and returns when NCCL does; nothing if the end has begun already."""
        with self._lock:
            busy = self._closed is not None
            self._closed = self._closed or "the process ends"
        if not busy:
            self._raw.abort()

    def forget(self, reason: str) -> None:
        """Makes every use an error, without a call of NCCL."""
        self._lock = threading.Lock()
        self._closed = reason
        self._forgotten = True

    def _destroy(self) -> None:
        with current(self.device):
            self._raw.destroy()

    def _end(self, what: str, reason: str, function: Callable[[], None]) -> bool:
        with self._lock:
            if self._forgotten:
                return True
            if self._ending is None:
                self._closed = self._closed or reason
                self._ending = deadline.start(function)
            call = self._ending
        if not call.wait(ABORT_SECONDS):
            _log.warning(left_behind(self.member, what))
            return False
        if died(self):
            let_go(self._raw)
        call.result()
        return True

    def _check(self, what: str) -> None:
        if self._closed is not None:
            raise self.member.fault(what, self._closed)

    def _reduction(self, what: str, dtype: torch.dtype, op: Any) -> tuple[Reduction, int]:
        name = op if type(op) is dist.ReduceOp.RedOpType else op.op
        try:
            kind = reduced(dtype, name)
            if kind.op != PREMUL_SUM:
                return kind, kind.op
            return kind, self._factors.number(self.handle, op, dtype, kind.code)
        except TypeError as error:
            raise TypeError(self.member.says(what, str(error))) from None
        except StatusError as error:
            raise self._translated(what, error) from None

    def _call(self, what: str, function: Callable[..., None], arguments: tuple[int, ...]) -> None:
        if self._closed is not None:
            raise self.member.fault(what, self._closed)
        try:
            function(*arguments)
        except Exception as error:
            self._settle(what, error)

    def _settle(self, what: str, error: Exception) -> None:
        """Raises what a call's error means, or waits for the call that goes on."""
        if self._closed is not None:
            raise self.member.fault(what, self._closed) from None

        def failed() -> None:
            raise error

        def late(text: str) -> dist.DistBackendError:
            return self.member.fault(what, f"timed out after {self._timeout * 1000:.0f} ms: {text}")

        end = time.monotonic() + self._timeout
        finish(self.library, self.member, what, self._raw, failed, end, late)

    @contextlib.contextmanager
    def _translating(self, what: str) -> Iterator[None]:
        try:
            yield
        except StatusError as error:
            raise self._translated(what, error) from None

    def _translated(self, what: str, error: Exception) -> Exception:
        if self._closed is not None:
            return self.member.fault(what, self._closed)
        return translated(self.library, self.member, what, error)


@contextlib.contextmanager
def group(*communicators: NcclCommunicator) -> Iterator[None]:
    """Issues the calls of its body together, on all of these communicators.

    Args:
        communicators: All that the body uses, at least one.

    Raises:
        DistBackendError: NCCL failed.
        ValueError: No communicator is given.
    """
    if not communicators:
        raise ValueError("fastcoll.group: expected the communicators that the group uses, got none")
    first = communicators[0]
    nccl = first.library.cupy
    for one in communicators:
        one._check("group")
    try:
        nccl.groupStart()
    except Exception as error:
        raise first._translated("group", error) from None
    try:
        yield
    except BaseException:
        # NCCL has no way to drop a group, but it drops one in which a call was wrong.
        with contextlib.suppress(Exception):
            first._raw.allReduce(0, 0, 0, -1, 0, 0)
        with contextlib.suppress(Exception):
            nccl.groupEnd()
        raise
    try:
        nccl.groupEnd()
    except Exception as error:
        for one in communicators:
            one._settle("group", error)
