"""The engine of device tensors, its half in Python: operations become calls of NCCL on a stream.

The other half (csrc/device/device_engine) owns streams, events, works and the watchdog, and calls
:meth:`CudaEngine.issue` with the stream current. Nothing here looks at a tensor or waits for a stream.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll._load import C
from fastcoll.cuda import nccl_library
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_devices import DeviceCommunicators

__all__ = ["CudaEngine", "Operation"]

Operation = tuple[int, int, int, int, float, int, int, int, int]
"""What csrc/device/device_request.hpp describes: collective, dtype and op (indices into ``C.COLLECTIVES``,
``C.DTYPES``, ``C.REDUCE_OPS``), root or peer, factor, then address and elements of the input and of the output."""

# "opaque" elements are bytes.
_DTYPES = tuple(getattr(torch, name, torch.uint8) for name in C.DTYPES)
_OPS = tuple(getattr(dist.ReduceOp, name, None) for name in C.REDUCE_OPS)
_PREMUL_SUM = C.REDUCE_OPS.index("PREMUL_SUM")
(
    _ALL_REDUCE,
    _BROADCAST,
    _REDUCE,
    _ALL_GATHER,
    _REDUCE_SCATTER,
    _SEND,
    _RECV,
) = (
    C.COLLECTIVES.index(name)
    for name in (
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "send",
        "recv",
    )
)


def _never() -> bool:
    return False


class CudaEngine:
    """NCCL for one group on this rank.

    Communicators are made when a device, or a pair of ranks, is first used.

    Args:
        store: The group's.
        group: Its name.
        rank: This process in the group.
        size: Number of ranks.
        timeout: How long the making of a communicator waits for the other ranks.
        device_type: "cuda"; a test has another one.

    Attributes:
        communicators: What the watchdog asks and aborts, without Python.

    Raises:
        ImportError: CuPy or NCCL is missing, or there are two copies of NCCL.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        rank: int,
        size: int,
        timeout: timedelta,
        device_type: str = "cuda",
    ) -> None:
        entry = nccl_library.load().entry_points()
        self.communicators = C.Communicators(
            entry["ncclCommAbort"], entry["ncclCommGetAsyncError"], entry["ncclGetErrorString"]
        )
        self._store = store
        self._member = Member(group, rank, size)
        self._timeout = timeout
        self._device_type = device_type
        self._making = threading.Lock()
        self._of_devices = DeviceCommunicators(store, group, rank, size, timeout)
        self._of_pairs: dict[tuple[int, int], NcclCommunicator] = {}
        self._known: dict[tuple[int, int], NcclCommunicator] = {}
        self._is_capturing: Callable[[], bool] = (
            torch.cuda.is_current_stream_capturing if device_type == "cuda" else _never
        )

    def issue(self, operations: Sequence[Operation], stream: int, device: int, pair: int) -> bool:
        """Puts operations on a stream, together where they are several.

        Args:
            operations: What to do.
            stream: Handle of the stream, which is current.
            device: Index of its device.
            pair: The one other rank that takes part, in a communicator of two; -1: all ranks do.

        Returns:
            Whether the stream is being captured into a graph.

        Raises:
            TypeError: NCCL has no such reduction.
            DistBackendError: NCCL failed, or a rank has not come to the making of a communicator.
        """
        if self.communicators.aborted:
            raise self._member.fault("issue", "the group was aborted")
        if not operations:
            return self._is_capturing()
        communicator = self._known.get((device, pair))
        if communicator is None:
            communicator = self._communicator(device, pair)
        if len(operations) == 1:
            self._call(communicator, operations[0], stream, pair)
        else:
            with communicator.group():
                for operation in operations:
                    self._call(communicator, operation, stream, pair)
        return self._is_capturing()

    def close(self) -> None:
        """Destroys what lives; what was aborted is left alone."""
        for communicator in {id(one): one for one in self._known.values()}.values():
            if self._alive(communicator):
                communicator.destroy()
            else:
                communicator.forget("the group was aborted")
        self._known.clear()

    def _alive(self, communicator: NcclCommunicator) -> bool:
        return communicator.closed is None and self.communicators.remove(communicator.handle)

    def _call(
        self, communicator: NcclCommunicator, operation: Operation, stream: int, pair: int
    ) -> None:
        collective, kind, number, root, factor, source, count, target, out_count = operation
        dtype = _DTYPES[kind]
        if collective == _ALL_REDUCE:
            op = self._reduction(number, factor)
            communicator.all_reduce(source, target, count, dtype, op, stream)
        elif collective == _ALL_GATHER:
            communicator.all_gather(source, target, count, dtype, stream)
        elif collective == _REDUCE_SCATTER:
            op = self._reduction(number, factor)
            communicator.reduce_scatter(source, target, out_count, dtype, op, stream)
        elif collective == _BROADCAST:
            target = target or source  # in place on the root
            communicator.broadcast(source, target, count or out_count, dtype, root, stream)
        elif collective == _REDUCE:
            op = self._reduction(number, factor)
            communicator.reduce(source, target, count, dtype, op, root, stream)
        elif collective == _SEND:
            communicator.send(source, count, dtype, self._peer(root, pair), stream)
        elif collective == _RECV:
            communicator.receive(target, out_count, dtype, self._peer(root, pair), stream)
        else:
            raise ValueError(
                self._member.says(
                    C.COLLECTIVES[collective], "expected an operation of NCCL, got another"
                )
            )

    def _peer(self, rank: int, pair: int) -> int:
        """Returns the peer's rank in the communicator."""
        return rank if pair < 0 else int(rank > self._member.rank)

    def _reduction(self, number: int, factor: float) -> object:
        if number == _PREMUL_SUM:
            return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        return _OPS[number]

    def _communicator(self, device: int, pair: int) -> NcclCommunicator:
        """Returns the communicator of a device or pair, made now and shown to the watchdog."""
        with self._making:
            key = (device, pair)
            if key in self._known:
                return self._known[key]
            where = torch.device(self._device_type, device)
            made = self._of_devices.on(where) if pair < 0 else self._pair(where, pair)
            name = f"of {where}" if pair < 0 else f"with rank {pair} on {where}"
            self.communicators.add(made.handle, name)
            if pair < 0 and not self.communicators.instance:
                self.communicators.instance = made.instance
            self._known[key] = made
            return made

    def _pair(self, device: torch.device, peer: int) -> NcclCommunicator:
        low, high = sorted((self._member.rank, peer))
        return NcclCommunicator.create(
            PrefixStore(f"pair/{low}-{high}", self._store),
            group=f"{self._member.group}, ranks {low} and {high}",
            rank=int(self._member.rank == high),
            size=2,
            device=device,
            timeout=self._timeout,
        )


# After the import of what aborts communicators at exit, hence called before it: groups close theirs first.
atexit.register(C._shutdown_all)
