"""Memory that NCCL need not copy: torch memory pools, registered with a group's communicators.

As with torch's NCCL backend::

    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(...)
    backend.register_mem_pool(pool)
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastcoll._load_cuda import CUDA
from fastcoll.cuda import deadline, nccl_library
from fastcoll.cuda.nccl import NcclCommunicator, current
from fastcoll.cuda.nccl_life import ABORT_SECONDS

Value = TypeVar("Value")

__all__ = ["RegisteredPools", "allocator", "deregister", "register"]


class RegisteredPools:
    """The pools that a group has registered.

    Args:
        communicators: The group's communicators, as the watchdog has them.
        known: The same communicators by device and pair. Who adds one must hold the lock and call ``extend``.

    Attributes:
        lock: Held while pools or communicators change.
    """

    def __init__(
        self, communicators: CUDA.Communicators, known: Mapping[tuple[int, int], NcclCommunicator]
    ) -> None:
        self.lock = threading.Lock()
        self._communicators = communicators
        self._known = known
        self._pools: dict[tuple[int, int], tuple[Any, bool]] = {}
        self._handles: dict[tuple[int, int], list[tuple[NcclCommunicator, int]]] = {}

    def register(self, pool: Any, symmetric: bool) -> None:
        """Registers the pool's segments with the communicators of their device.

        Args:
            pool: A ``torch.cuda.MemPool``.
            symmetric: Whether to register windows, which all ranks do together and in the same order.

        Raises:
            ValueError: The pool is registered already.
            DistBackendError: NCCL refused.
        """
        with self.lock:
            if pool.id in self._pools:
                raise ValueError(
                    "fastcoll.register_mem_pool: expected a pool that is not registered, got one that is. Call "
                    "deregister_mem_pool first, to register what was allocated since."
                )
            self._pools[pool.id], self._handles[pool.id] = (pool, symmetric), []
            try:
                for communicator in list(self._known.values()):
                    self._register(pool, symmetric, communicator)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    self._deregister(pool)
                raise

    def deregister(self, pool: Any) -> None:
        """Undoes a registration.

        Raises:
            ValueError: The pool is not registered.
            DistBackendError: NCCL refused a segment. The other segments are deregistered; the call may be repeated.
        """
        with self.lock:
            self._deregister(pool)

    def _deregister(self, pool: Any) -> None:
        if pool.id not in self._pools:
            raise ValueError(
                "fastcoll.deregister_mem_pool: expected a pool that is registered, got another one. Call "
                "register_mem_pool first."
            )
        _, symmetric = self._pools[pool.id]
        left, errors = [], []
        for communicator, handle in self._handles[pool.id]:
            try:
                if communicator.closed is None:
                    self._call(communicator, communicator.deregister, handle, symmetric)
            except Exception as error:
                left.append((communicator, handle))
                errors.append(error)
        self._handles[pool.id] = left
        if errors:
            raise errors[0]
        del self._pools[pool.id], self._handles[pool.id]

    def extend(self, communicator: NcclCommunicator) -> None:
        """Registers all pools with a new communicator; call it with the lock."""
        for pool, symmetric in self._pools.values():
            self._register(pool, symmetric, communicator)

    def _register(self, pool: Any, symmetric: bool, communicator: NcclCommunicator) -> None:
        for segment in pool.snapshot():
            if segment["device"] == (communicator.device.index or 0):
                where = segment["address"], segment["total_size"]
                handle = self._call(communicator, communicator.register, *where, symmetric)
                self._handles[pool.id].append((communicator, handle))

    def _call(
        self, communicator: NcclCommunicator, function: Callable[..., Value], *arguments: Any
    ) -> Value:
        """Calls NCCL between other calls on the communicators, for at most the communicator's timeout.

        Raises:
            DistBackendError: The call took longer; the group is aborted then.
        """

        def on_device() -> Value:
            with current(communicator.device):
                return function(*arguments)

        self._communicators.begin_calls()
        try:
            call = deadline.start(on_device)
            if call.wait(communicator.timeout):
                return call.result()
        finally:
            self._communicators.end_calls()
        fault = communicator.member.fault(
            "nccl_register",
            f"timed out after {communicator.timeout * 1000:.0f} ms: windows are registered by all ranks together, in "
            "the same order. Call register_mem_pool on every rank. The group is aborted.",
        )
        deadline.start(lambda: self._communicators.abort_all(str(fault))).wait(ABORT_SECONDS)
        raise fault


def register(group: str, pool: Any, symmetric: bool) -> None:
    """Registers a ``torch.cuda.MemPool`` with the present and future communicators of a group; see ``RegisteredPools``.

    Later allocations from the pool are not registered.

    Raises:
        ValueError: The pool is registered already.
        DistBackendError: NCCL refused.
        RuntimeError: The group has no communicator yet.
    """
    _engine(group).pools.register(pool, symmetric)


def deregister(group: str, pool: Any) -> None:
    """Undoes ``register``; call it before the pool's memory is freed.

    Raises:
        ValueError: The pool is not registered.
        RuntimeError: The group has no communicator yet.
    """
    _engine(group).pools.deregister(pool)


@functools.cache
def _plugged() -> Any:
    from torch.cuda.memory import CUDAPluggableAllocator

    library = nccl_library.load()
    CUDA.set_nccl_allocator(library.address("ncclMemAlloc"), library.address("ncclMemFree"))
    return CUDAPluggableAllocator(CUDA.__file__, "fastcoll_nccl_allocate", "fastcoll_nccl_free")


def allocator() -> Any:
    """Returns an allocator for ``torch.cuda.MemPool``, of the memory that NCCL registers best.

    Raises:
        ImportError: CuPy or NCCL is missing.
    """
    return _plugged().allocator()


def _engine(group: str) -> Any:
    from fastcoll.cuda.engine import engine_of

    engine = engine_of(group)
    if engine is None:
        raise RuntimeError(
            f"fastcoll.register_mem_pool [group '{group}']: expected a communicator of NCCL, and there is none yet. "
            "Give init_process_group a device_id, or call one collective before."
        )
    return engine
