"""What ranks of the ``world`` fixture need to use NcclCommunicator over the stand-in."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from suite_rules import until
from torch import Tensor
from world import here

from fastcoll._load_cuda import CUDA
from fastcoll.cuda.engine import CudaEngine
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_config import NcclConfig
from fastcoll.cuda.nccl_init import create_communicator

CPU = torch.device("cpu")


class StandIn:
    """The functions that the stand-in, which this process has loaded, has beside NCCL's: faults, and its calls."""

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(None)
        library.fakeNcclInject.argtypes = [ctypes.c_char_p]
        library.fakeNcclCall.restype = ctypes.c_char_p
        return library

    def inject(self, kind: str, name: str, number: int = 0, after: int = 0, times: int = 1) -> None:
        """Adds a fault; see tests/fake_nccl/faults.c."""
        text = f"{kind} {name} {number} {after} {times}"
        assert self._library.fakeNcclInject(text.encode()) == 0, text

    def clear(self) -> None:
        """Takes all faults back and forgets the calls."""
        self._library.fakeNcclClearFaults()
        self._library.fakeNcclClearCalls()

    def calls(self) -> list[tuple[str, dict[str, int]]]:
        """Returns name and arguments of all calls, in order."""
        found = []
        for index in range(self._library.fakeNcclCallCount()):
            name, *arguments = self._library.fakeNcclCall(index).decode().split()
            pairs = (argument.split("=") for argument in arguments)
            found.append((name, {key: int(value, 0) for key, value in pairs}))
        return found

    def names(self) -> list[str]:
        """Returns the names of all calls, in order."""
        return [name for name, _ in self.calls()]

    def wait_for(self, name: str) -> None:
        """Waits until this process is in a call of this name, or has been."""
        until(lambda: name in self.names())


stand_in = StandIn()


def prepare() -> None:
    """Readies a rank."""
    device_ranks.stand_in()


_engines: list[CudaEngine] = []
"""Those of the running test."""


def cleared(test: Callable[..., None], *arguments: object) -> None:
    """Calls a test with no faults before and after it, and closes its engines."""
    stand_in.clear()
    try:
        test(*arguments)
        for engine in _engines:
            engine.close()
    finally:
        _engines.clear()
        stand_in.clear()


@functools.lru_cache(maxsize=1)
def _file_store(path: str, size: int) -> dist.FileStore:
    """One object a rank and call: the last of ``size`` objects that goes removes the file under later ones."""
    return dist.FileStore(path, size)


def store(name: str = "store") -> dist.Store:
    """Returns a store that the ranks of this call share, the same each time that they ask for this name."""
    return dist.PrefixStore(name, _file_store(str(here().scratch / "store"), here().size))


def create(
    timeout: float = 30, name: str = "g", generation: int = 0, config: NcclConfig | None = None
) -> NcclCommunicator:
    """Makes the communicator of all ranks of this call, through a store of its own for each name."""
    member = Member("g", here().rank, here().size)
    return create_communicator(store(name), member, CPU, timeout, generation, str, config)


def engine_of(name: str, timeout: float = 30, **options: Any) -> CudaEngine:
    """Makes the engine of all ranks of this call; it has no communicator yet."""
    place, limit = (here().rank, here().size), timedelta(seconds=timeout)
    _engines.append(CudaEngine(store(name), name, *place, limit, "cpu", **options))
    return _engines[-1]


@contextlib.contextmanager
def communicator(timeout: float = 30) -> Iterator[NcclCommunicator]:
    """A communicator for the body."""
    made = create(timeout)
    try:
        yield made
    except BaseException:
        made.abort()
        raise
    assert made.destroy()


class Tensors:
    """Calls with tensors in place of addresses, on stream 7, as the engine makes them."""

    STREAM = 7

    def __init__(self, made: NcclCommunicator) -> None:
        self.made = made

    def issue(
        self, what: str, send: Tensor, receive: Tensor, root: int = -1, op: str | None = None
    ) -> None:
        operation = len(CUDA.REDUCE_OPS) if op is None else CUDA.REDUCE_OPS.index(op)
        self._issue(what, send, receive, operation, root, 1.0, 0)

    def reduce(
        self, what: str, send: Tensor, receive: Tensor, op: str, factor: float | Tensor = 1.0
    ) -> None:
        """A call of an operation that may have a factor."""
        number, address = (1.0, factor.data_ptr()) if isinstance(factor, Tensor) else (factor, 0)
        self._issue(what, send, receive, CUDA.REDUCE_OPS.index(op), 0, number, address)

    def all_reduce(self, send: Tensor, receive: Tensor) -> None:
        """The sum."""
        self.issue("all_reduce", send, receive, op="SUM")

    def _issue(
        self,
        what: str,
        send: Tensor,
        receive: Tensor,
        op: int,
        root: int,
        factor: float,
        factor_on_device: int,
    ) -> None:
        kind = CUDA.DTYPES.index(str(send.dtype).removeprefix("torch."))
        self.made.calls.issue(
            *(CUDA.COLLECTIVES.index(what), kind, op, root, factor, factor_on_device),
            *(send.data_ptr(), send.numel(), receive.data_ptr(), receive.numel(), self.STREAM),
        )


on_stand_in = functools.partial(on_ranks, world="stand_in_world", around=cleared, init=False)
"""Marks a test that ranks run, which have the stand-in and no faults."""
