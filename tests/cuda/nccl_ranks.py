"""What ranks of the ``world`` fixture need to use NcclCommunicator over the stand-in."""

import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from world_rank import here

from fastcoll.cuda.nccl import NcclCommunicator

__all__ = ["CPU", "StandIn", "Tensors", "communicator", "create", "store"]

CPU = torch.device("cpu")


class StandIn:
    """The functions that the stand-in has beside NCCL's: faults, and the record of calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fakeNcclInject.argtypes = [ctypes.c_char_p]
        library.fakeNcclCall.restype = ctypes.c_char_p
        library.fakeNcclExpectStream.argtypes = [ctypes.c_void_p]

    @staticmethod
    @functools.cache
    def load(path: str | None) -> "StandIn":
        """Loads it in this process, or finds it loaded."""
        return StandIn(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))

    def inject(self, kind: str, name: str, number: int = 0, after: int = 0, times: int = 1) -> None:
        """Adds a fault; see tests/fake_nccl/faults.c."""
        text = f"{kind} {name} {number} {after} {times}"
        assert self._library.fakeNcclInject(text.encode()) == 0, text

    def clear(self) -> None:
        """Takes all faults back and forgets the calls."""
        self._library.fakeNcclClearFaults()
        self._library.fakeNcclExpectAnyStream()
        self._library.fakeNcclClearCalls()

    def expect_stream(self, stream: int) -> None:
        """Makes a call on any other stream an error."""
        self._library.fakeNcclExpectStream(stream)

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


@functools.lru_cache(maxsize=1)
def _file_store(path: str, size: int) -> dist.FileStore:
    """One object a rank and call: the last of ``size`` objects that goes removes the file under later ones."""
    return dist.FileStore(path, size)


def store(name: str = "store") -> dist.Store:
    """Returns a store that the ranks of this call share, the same each time that they ask for this name."""
    return dist.PrefixStore(name, _file_store(str(here().scratch / "store"), here().size))


def create(path: str, timeout: float = 30, name: str = "g", **options: object) -> NcclCommunicator:
    """Makes the communicator of all ranks of this call."""
    StandIn.load(path)
    where = {"store": store(name), "rank": here().rank, "size": here().size, **options}
    return NcclCommunicator.create(
        group=name, device=CPU, timeout=timedelta(seconds=timeout), **where
    )


@contextlib.contextmanager
def communicator(path: str, timeout: float = 30) -> Iterator[NcclCommunicator]:
    """A communicator for the body, and no faults before and after it."""
    stand_in = StandIn.load(path)
    stand_in.clear()
    made = create(path, timeout)
    try:
        yield made
    except BaseException:
        made.abort()
        raise
    finally:
        stand_in.clear()
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
    def reduce(self, send: Tensor, receive: Tensor, op: object, root: int) -> None:
        self._issue("reduce", send, receive, root, op)

    def reduce_scatter(self, send: Tensor, receive: Tensor, op: object) -> None:
        self._issue("reduce_scatter", send, receive, -1, op)

    def broadcast(self, send: Tensor, receive: Tensor, root: int) -> None:
        self._issue("broadcast", send, receive, root)

    def _issue(
        self, what: str, send: Tensor, receive: Tensor, root: int, op: object = None
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
