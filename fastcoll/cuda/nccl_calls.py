"""The calls of a communicator that move data: addresses, counts, torch's dtypes, a stream.

They take no tensors, wait for no stream, and release the GIL. They go through C++ (csrc/device/nccl.cpp), as the
engine's do.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._load import C
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_library import IN_PROGRESS, NcclLibrary, StatusError
from fastcoll.cuda.nccl_status import translated

__all__ = ["DataCalls"]

_KINDS = {
    getattr(torch, name): number for number, name in enumerate(C.DTYPES) if hasattr(torch, name)
}
_BYTES = len(C.DTYPES) - 1  # any other dtype is moved as bytes
_COLLECTIVES = {name: number for number, name in enumerate(C.COLLECTIVES)}
_OPS = {name: number for number, name in enumerate(C.REDUCE_OPS)}
_NO_OP = len(C.REDUCE_OPS)

_NAME = dist.ReduceOp.RedOpType  # type of dist.ReduceOp.SUM; a work's options hold a dist.ReduceOp


_SYMMETRIC = 1  # NCCL's flag for a window that all ranks use at the same offset
_GLANCE = 0.001  # seconds between two polls of a registration in progress


class DataCalls:
    """The data calls of a communicator.

    Args:
        raw: CuPy's communicator.
        member: Group, rank and size.
        timeout: Seconds that a split waits for the other ranks, and that a call of a nonblocking communicator may
            stay in progress.
        library: The NCCL library to call.

    Attributes:
        calls: The same calls for C++.
        timeout: Seconds that a split waits for the other ranks.
        ended_elsewhere: Returns why the communicator has ended, if another object aborted it.
    """

    def __init__(self, raw: Any, member: Member, timeout: float, library: NcclLibrary) -> None:
        self.member = member
        self.library = library
        self.calls = C.NcclCalls(
            library.functions, int(raw.comm), member.size, timedelta(seconds=timeout)
        )
        self._raw = raw
        self.timeout = timeout
        self._closed: str | None = None
        self.ended_elsewhere: Callable[[], str | None] | None = None

    @property
    def handle(self) -> int:
        """The address of NCCL's own object, for NCCL functions that are called by address.

        Raises:
            DistBackendError: The communicator is aborted or destroyed.
        """
        self._check("handle")
        return int(self._raw.comm)

    @property
    def closed(self) -> str | None:
        """Why the communicator has ended; None while it lives."""
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
            count: Number of elements.
            dtype: Their dtype.
            op: A ``dist.ReduceOp`` or one of its names; AVG is NCCL's own, which truncates integers.
            stream: Handle of the CUDA stream.

        Raises:
            TypeError: NCCL has no such reduction of this dtype.
            DistBackendError: NCCL failed.
        """
        self._issue("all_reduce", dtype, (send, count), (receive, count), stream, op=op)

    def all_gather(
        self, send: int, receive: int, count: int, dtype: torch.dtype, stream: int
    ) -> None:
        """Copies every rank's ``count`` elements, in rank order, to ``receive`` on all ranks."""
        gathered = (receive, self.member.size * count)
        self._issue("all_gather", dtype, (send, count), gathered, stream)

    def send(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Sends ``count`` elements to a rank, which calls ``receive`` with the same count and dtype."""
        self._issue("send", dtype, (address, count), (0, 0), stream, peer)

    def receive(self, address: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        """Receives what ``peer`` sends."""
        self._issue("recv", dtype, (0, 0), (address, count), stream, peer)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Issues the calls of its body together; sends and receives may come in any order.

        If the body raises, none of them is issued. Groups may be nested: the outermost issues the calls.

        Raises:
            DistBackendError: NCCL failed.
        """
        self._check("group")
        with self._naming("group"):
            self.calls.begin_group()
        try:
            yield
        except BaseException:
            # NCCL has no call to drop a group, but it drops one that contains an invalid call. A communicator that
            # was aborted meanwhile must not be touched.
            if self.closed is None:
                with contextlib.suppress(Exception):
                    self._raw.allReduce(0, 0, 0, -1, 0, 0)
            with contextlib.suppress(Exception):
                self.calls.end_group()
            raise
        with self._naming("group"):
            self.calls.end_group()

    def register(self, address: int, size: int, symmetric: bool = False) -> int:
        """Registers ``size`` bytes of device memory; returns the handle for ``deregister``.

        Args:
            address: Where the memory begins.
            size: In bytes.
            symmetric: Whether as a window: all ranks register together and use the same offset in every call.

        Raises:
            DistBackendError: NCCL failed.
        """
        place = ctypes.c_void_p()
        with self._translating("nccl_register"):
            try:
                if symmetric:
                    self.library.register_window(self.handle, address, size, place, _SYMMETRIC)
                else:
                    self.library.register(self.handle, address, size, place)
            except StatusError as error:
                if error.status != IN_PROGRESS:
                    raise
                while not place.value and self.closed is None:  # NCCL writes it on completion
                    time.sleep(_GLANCE)
        self._check("nccl_register")
        return place.value or 0

    def deregister(self, registration: int, symmetric: bool = False) -> None:
        """Undoes a registration; call it before its memory is freed.

        Raises:
            DistBackendError: NCCL failed.
        """
        with self._translating("nccl_deregister"):
            if symmetric:
                self.library.deregister_window(self.handle, registration)
            else:
                self.library.deregister(self.handle, registration)

    def _check(self, what: str) -> None:
        if (closed := self.closed) is not None:
            raise self.member.fault(what, closed)

    def _issue(
        self,
        what: str,
        dtype: torch.dtype,
        given: tuple[int, int],
        result: tuple[int, int],
        stream: int,
        root: int = -1,
        op: Any = None,
    ) -> None:
        """Makes a call; `given` and `result` are (address, elements)."""
        self._check(what)
        kind = _KINDS.get(dtype, _BYTES)
        if kind == _BYTES:
            given, result = (
                (address, count * dtype.itemsize) for address, count in (given, result)
            )
        number, factor, where = (_NO_OP, 1.0, 0) if op is None else self._reduction(what, dtype, op)
        numbers = (_COLLECTIVES[what], kind, number, root, factor, where)
        with self._naming(what):
            self.calls.issue(*numbers, *given, *result, stream)

    def _reduction(self, what: str, dtype: torch.dtype, op: Any) -> tuple[int, float, int]:
        """Returns the operation's number, its factor, and the factor's address if it is a tensor."""
        kind = op if type(op) is _NAME else op.op
        if kind.name != "PREMUL_SUM":
            return _OPS[kind.name], 1.0, 0
        factor: float | torch.Tensor | None = None
        if type(op) is not _NAME:
            with contextlib.suppress(RuntimeError):  # torch's, for an operation with no factor
                factor = op.__getstate__()[1]
        problem = ""
        real = dtype.to_real() if dtype.is_complex else dtype
        if factor is None:
            problem = "expected PREMUL_SUM with a factor: torch's _make_nccl_premul_sum(factor)"
        elif isinstance(factor, torch.Tensor) and (factor.dtype != real or factor.numel() != 1):
            problem = f"expected a factor of one element of {real}, got {factor.numel()} of {factor.dtype}"
        if factor is None or problem:
            raise TypeError(self.member.says(what, problem))
        if isinstance(factor, torch.Tensor):
            return _OPS[kind.name], 1.0, factor.data_ptr()
        return _OPS[kind.name], float(factor), 0

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Adds the head with call, group and rank to C++ errors."""
        try:
            yield
        except TypeError as error:
            raise TypeError(self.member.says(what, str(error))) from None
        except dist.DistBackendError as error:
            self._check(what)  # after an abort, its reason is the error to raise
            raise self.member.fault(what, str(error)) from None

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
