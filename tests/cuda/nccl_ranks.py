"""What ranks of the ``world`` fixture need to use NcclCommunicator over the stand-in."""

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_ranks
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from world_rank import here

from fastcoll.cuda.engine import CudaEngine
from fastcoll.cuda.nccl import NcclCommunicator

__all__ = [
    "CPU",
    "Tensors",
    "cleared",
    "communicator",
    "create",
    "engine_of",
    "on_stand_in",
    "prepare",
    "stand_in",
    "store",
]

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
        while name not in self.names():
            time.sleep(0.001)


stand_in = StandIn()


def prepare() -> None:
    """Readies a rank."""
    device_ranks.stand_in()


def cleared(test: Callable[..., None], *arguments: object) -> None:
    """Calls a test with no faults before and after it."""
    stand_in.clear()
    try:
        test(*arguments)
    finally:
        stand_in.clear()


@functools.lru_cache(maxsize=1)
def _file_store(path: str, size: int) -> dist.FileStore:
    """One object a rank and call: the last of ``size`` objects that goes removes the file under later ones."""
    return dist.FileStore(path, size)


def store(name: str = "store") -> dist.Store:
    """Returns a store that the ranks of this call share, the same each time that they ask for this name."""
    return dist.PrefixStore(name, _file_store(str(here().scratch / "store"), here().size))


def create(timeout: float = 30, name: str = "g", **options: Any) -> NcclCommunicator:
    """Makes the communicator of all ranks of this call."""
    where = {"store": store(name), "group": name, "rank": here().rank, "size": here().size}
    limit = timedelta(seconds=timeout)
    return NcclCommunicator.create(**{**where, "device": CPU, "timeout": limit, **options})


def engine_of(name: str, timeout: float = 30, **options: Any) -> CudaEngine:
    """Makes the engine of all ranks of this call; it has no communicator yet."""
    limit = timedelta(seconds=timeout)
    return CudaEngine(store(name), name, here().rank, here().size, limit, "cpu", **options)


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
    """Calls with tensors in place of addresses, on stream 7."""

    STREAM = 7

    def __init__(self, made: NcclCommunicator) -> None:
        self.made = made

    def all_reduce(self, send: Tensor, receive: Tensor, op: object) -> None:
        self.made.all_reduce(
            send.data_ptr(), receive.data_ptr(), send.numel(), send.dtype, op, self.STREAM
        )

    # What the engine calls in C++, here with the names and errors of a communicator.
    def issue(
        self, what: str, send: Tensor, receive: Tensor, root: int = -1, op: object = None
    ) -> None:
        places = [(tensor.data_ptr(), tensor.numel()) for tensor in (send, receive)]
        self.made._issue(what, send.dtype, *places, self.STREAM, root, op)

    def all_gather(self, send: Tensor, receive: Tensor) -> None:
        self.made.all_gather(
            send.data_ptr(), receive.data_ptr(), send.numel(), send.dtype, self.STREAM
        )

    def send(self, tensor: Tensor, peer: int) -> None:
        self.made.send(tensor.data_ptr(), tensor.numel(), tensor.dtype, peer, self.STREAM)

    def receive(self, tensor: Tensor, peer: int) -> None:
        self.made.receive(tensor.data_ptr(), tensor.numel(), tensor.dtype, peer, self.STREAM)


on_stand_in = functools.partial(on_ranks, world="stand_in_world", around=cleared, init=False)
"""Marks a test that ranks run, which have the stand-in and no faults."""
