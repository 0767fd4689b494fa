"""The calls of a communicator that move data, thin over CuPy's: addresses, counts, torch's dtypes, a stream.

They know no tensors and wait for no stream, and release the GIL.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_library import NcclLibrary, StatusError
from fastcoll.cuda.nccl_reductions import PreMulSums
from fastcoll.cuda.nccl_status import finish, translated
from fastcoll.cuda.nccl_types import AVG, PREMUL_SUM, Reduction, moved, reduced
from fastcoll.cuda.one_rank import FIXED_IN, whole_pieces

__all__ = ["DataCalls", "group"]

_NAME = dist.ReduceOp.RedOpType  # what dist.ReduceOp.SUM is; a work's options hold a dist.ReduceOp


class DataCalls:
    """A communicator as that which is called.

    Args:
        raw: CuPy's communicator.
        member: Group, rank and size.
        timeout: How many seconds a call is waited for that NCCL does not block in; few communicators are such.
        library: The NCCL behind it.

    Attributes:
        ended_elsewhere: Returns why it is no more, if NCCL was told so by others than this object.
    """

    def __init__(self, raw: Any, member: Member, timeout: float, library: NcclLibrary) -> None:
        self.member = member
        self.library = library
        self._raw = raw
        self._timeout = timeout
        self._closed: str | None = None
        self.ended_elsewhere: Callable[[], str | None] | None = None
        self._factors = PreMulSums(library)
        self._drops_ends = member.size == 1 and library.version < FIXED_IN

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
        if self._closed is None and self.ended_elsewhere is not None:
            return self.ended_elsewhere()
        return self._closed

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: torch.dtype, op: Any, stream: int
    ) -> None:
        """Reduces ``count`` elements of all ranks into ``receive``, which may be ``send``.

        Args:
            send: Address of this rank's elements.
            receive: Address of the result.
            count: Elements.
            dtype: Theirs.
            op: A ``dist.ReduceOp`` or one of its names, or what ``nccl_types.reduced`` says of it and ``dtype``; AVG
                is NCCL's own and truncates integers.
            stream: Handle of the CUDA stream.

        Raises:
            TypeError: NCCL has no such reduction of this dtype.
            DistBackendError: NCCL failed.
        """
        what = "all_reduce"
        self._reduce(what, self._raw.allReduce, (send, receive), count, dtype, op, stream)

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
        self._reduce("reduce", self._raw.reduce, (send, receive), count, dtype, op, root, stream)

    def reduce_scatter(
        self, send: int, receive: int, count: int, dtype: torch.dtype, op: Any, stream: int
    ) -> None:
        """Reduces ``count`` elements for each rank, ``size * count`` in all, and leaves each its own."""
        what = "reduce_scatter"
        self._reduce(what, self._raw.reduceScatter, (send, receive), count, dtype, op, stream)

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
        code, parts = moved(dtype)
        args = (send, receive, count * parts, code, root, stream)
        self._call("broadcast", self._raw.broadcast, args)

    def all_gather(
        self, send: int, receive: int, count: int, dtype: torch.dtype, stream: int
    ) -> None:
        """Copies every rank's ``count`` elements, in rank order, to ``receive`` on all ranks."""
        code, parts = moved(dtype)
        args = (send, receive, count * parts, code, stream)
        self._call("all_gather", self._raw.allGather, args)

    def send(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Sends ``count`` elements to a rank, which calls :meth:`receive` with the same count and dtype."""
        code, parts = moved(dtype)
        args = (address, count * parts, code, peer, stream)
        self._call("send", self._raw.send, args)

    def receive(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Receives what ``peer`` sends."""
        code, parts = moved(dtype)
        args = (address, count * parts, code, peer, stream)
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

    def _check(self, what: str) -> None:
        if (closed := self.closed) is not None:
            raise self.member.fault(what, closed)

    def _reduction(self, what: str, dtype: torch.dtype, op: Any) -> tuple[int, int, int]:
        """Returns NCCL's numbers: of the type, of its elements for one of the dtype's, of the operation."""
        if type(op) is Reduction:
            return op
        try:
            found = reduced(dtype, op if type(op) is _NAME else op.op)
            if found.op != PREMUL_SUM:
                return found
            code, parts, _ = found
            return code, parts, self._factors.number(self.handle, op, dtype, code)
        except TypeError as error:
            raise TypeError(self.member.says(what, str(error))) from None
        except StatusError as error:
            raise self._translated(what, error) from None

    def _reduce(
        self,
        what: str,
        function: Callable[..., None],
        addresses: tuple[int, int],
        count: int,
        dtype: torch.dtype,
        op: Any,
        *rest: int,
    ) -> None:
        code, parts, number = self._reduction(what, dtype, op)
        send, receive = addresses
        count *= parts
        # What an average of one rank leaves as it was is right.
        if not self._drops_ends or number < AVG or (number == AVG and send == receive):
            self._call(what, function, (send, receive, count, code, number, *rest))
            return
        item = dtype.itemsize // parts
        for first, some in whole_pieces(count, item):
            at = first * item
            self._call(what, function, (send + at, receive + at, some, code, number, *rest))

    def _call(self, what: str, function: Callable[..., None], arguments: tuple[int, ...]) -> None:
        if (closed := self.closed) is not None:
            raise self.member.fault(what, closed)
        try:
            function(*arguments)
        except Exception as error:
            self._settle(what, error)

    def _settle(self, what: str, error: Exception) -> None:
        """Raises what a call's error means, or waits for the call that goes on."""
        if (closed := self.closed) is not None:
            raise self.member.fault(what, closed) from None

        def failed() -> None:
            raise error

        def late(text: str) -> dist.DistBackendError:
            return self.member.fault(what, f"timed out after {self._timeout * 1000:.0f} ms: {text}")

        end = time.monotonic() + self._timeout
        try:
            finish(self.library, self.member, what, self._raw, failed, end, late)
        except dist.DistBackendError:
            self._check(what)  # the error of an abort meanwhile is its reason
            raise

    @contextlib.contextmanager
    def _translating(self, what: str) -> Iterator[None]:
        try:
            yield
        except StatusError as error:
            raise self._translated(what, error) from None

    def _translated(self, what: str, error: Exception) -> Exception:
        if (closed := self.closed) is not None:
            return self.member.fault(what, closed)
        return translated(self.library, self.member, what, error)


@contextlib.contextmanager
def group(*communicators: DataCalls) -> Iterator[None]:
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
        # NCCL has no way to drop a group, but it drops one in which a call was wrong. A communicator that was
        # aborted meanwhile must not be touched.
        if first.closed is None:
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
