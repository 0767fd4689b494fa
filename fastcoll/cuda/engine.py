"""The engine of device tensors, its half in Python: operations become kernels and calls of NCCL on a stream.

The other half (csrc/device/device_engine) owns streams, events, works and the watchdog, and calls
:meth:`CudaEngine.issue` with the stream current. Nothing here looks at a tensor or waits for a stream. All-reduces
go to :mod:`fastcoll.cuda.all_reduce` first, which leaves to NCCL what is best done by it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll._load import C
from fastcoll.cuda import nccl_library, symmetric
from fastcoll.cuda.all_reduce import AllReduces, Task
from fastcoll.cuda.call_options import NO_OPTIONS, current_options
from fastcoll.cuda.errors import Member
from fastcoll.cuda.mapping import MAPPERS
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_reductions import FactorOnDevice
from fastcoll.cuda.nccl_types import Reduction, reduced
from fastcoll.cuda.selector import AUTO
from fastcoll.cuda.shared_device import SharedDevice, communicator_of
from fastcoll.cuda.symmetric import Wish, open_region
from fastcoll.cuda.thresholds import DEFAULT, Thresholds, device_name

__all__ = ["CudaEngine", "Operation", "engine_of", "engines"]

_log = logging.getLogger("fastcoll.cuda")

Operation = tuple[int, int, int, int, float, int, int, int, int, int]
"""What csrc/device/device_request.hpp describes: collective, dtype and op (indices into ``C.COLLECTIVES``,
``C.DTYPES``, ``C.REDUCE_OPS``), root or peer, factor and where it lies on the device if it does, then address and
elements of the input and of the output."""

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

_engines: weakref.WeakValueDictionary[str, CudaEngine] = weakref.WeakValueDictionary()


def engine_of(group: str) -> CudaEngine | None:
    """Returns the engine of a group of this process, by its name; None before its first call on a device."""
    return _engines.get(group)


def engines() -> list[CudaEngine]:
    """Returns all engines of this process."""
    return list(_engines.values())


class _Aborted:
    """Whether the watchdog has aborted the group, in the forms in which communicators and kernels ask for it."""

    def __init__(self, communicators: C.Communicators) -> None:
        self._communicators = communicators

    def is_set(self) -> bool:
        return self._communicators.aborted

    def reason(self) -> str | None:
        """Returns why a communicator has ended; None: it has not."""
        return "the group was aborted" if self._communicators.aborted else None

    def wait(self, timeout: float) -> bool:
        """Returns whether it was set, waiting for that so long."""
        end = time.monotonic() + timeout
        while not self.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        return self.is_set()


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
        thresholds_on: Returns where all-reduce algorithms give way to each other on devices of a name.
        algorithm: FASTCOLL_ALGO.

    Attributes:
        communicators: What the watchdog asks and aborts, without Python.
        all_reduces: What serves all-reduces, by index of the device.

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
        thresholds_on: Callable[[str], Thresholds] = lambda name: DEFAULT,
        algorithm: str = AUTO,
    ) -> None:
        self.all_reduces: dict[int, AllReduces] = {}
        self._thresholds_on = thresholds_on
        self._algorithm = algorithm
        self.communicators = C.Communicators(nccl_library.load().entry_points())
        self._over = _Aborted(self.communicators)
        self._store = store
        self._member = Member(group, rank, size)
        self._timeout = timeout
        self._device_type = device_type
        self._making: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)
        self._of_all = threading.Lock()
        self._made: Counter[int] = Counter()
        self._splits = 0
        self._reductions: dict[tuple[int, int], Reduction] = {}
        self._known: dict[tuple[int, int], NcclCommunicator] = {}
        _engines[group] = self

    def prepare(self, device: int, pair: int, captured: bool) -> None:
        """Makes the communicator of a device, or of a pair of ranks on it, if there is none.

        Args:
            device: Its index.
            pair: The other rank of a pair; -1: all ranks take part.
            captured: Whether the caller's stream is being captured into a graph.

        Raises:
            DistBackendError: NCCL failed, the group was aborted, or a rank has not come.
            ValueError: There is none, and none can be made while a stream is being captured.
        """
        key = (device, pair)
        # A pair waits for no other pair; what all ranks make, they make one after the other.
        with self._of_all if pair < 0 else self._making[key]:
            if key in self._known:
                return
            if self._over.is_set():
                raise self._member.fault("init", "the group was aborted")
            if captured:
                raise ValueError(
                    "the first call of a group on a device makes NCCL's communicator, which cannot be captured into "
                    "a graph. Make one call before the capture."
                )
            where = torch.device(self._device_type, device)
            made = self._for_all(where) if pair < 0 else self._for_pair(where, pair)
            self._take(device, pair, made, made.instance)
            if pair < 0:
                self._open_region(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Has ranks wait so long for each other from the next call on."""
        self._timeout = timeout
        for reduces in list(self.all_reduces.values()):
            reduces.timeout = timeout.total_seconds()

    def _open_region(self, device: int) -> None:
        """Finds out with the other ranks what they can do beside NCCL; the communicator is there."""
        communicator = self._known[device, -1]
        where = torch.device(self._device_type, device)
        mapper = MAPPERS.get(self._device_type)
        wish = Wish(self._algorithm, self._thresholds_on(device_name(where)), symmetric.ROOM)
        region = open_region(
            PrefixStore(f"region/{communicator.instance}", self._store),
            self._member,
            where,
            self._timeout.total_seconds(),
            wish,
            self._over.is_set,
            communicator.instance,
            library=not isinstance(communicator, SharedDevice),
        )
        self.all_reduces[device] = AllReduces(
            communicator,
            region,
            where,
            where if mapper is None else mapper.kernel_device(where),
            wish.thresholds,
            wish.algorithm,
            self._over.is_set,
            self.communicators.report,
            self._timeout.total_seconds(),
        )

    def _take(self, device: int, pair: int, made: NcclCommunicator, instance: str) -> None:
        """Notes a communicator, and shows it to the watchdog."""
        name = f"of {made.device}" if pair < 0 else f"with rank {pair} on {made.device}"
        if isinstance(made, SharedDevice):  # nothing that the watchdog could ask or abort
            added = not self._over.is_set()
        else:
            added = self.communicators.add(made.handle, name, instance, pair)
        if not added:
            made.abort("the group was aborted")
            raise self._member.fault("init", "the group was aborted")
        made.instance = instance
        made.ended_elsewhere = self._over.reason
        self._known[device, pair] = made

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._member.group

    def split(self, device: int, color: int, key: int, child: CudaEngine | None) -> None:
        """Divides the ranks of a device's communicator; all of them call it.

        Args:
            device: Its index.
            color: Ranks with the same one share a communicator; -1 is for none.
            key: Orders the ranks in it.
            child: The engine of their group, which gets it.

        Raises:
            DistBackendError: NCCL failed, or a rank has not come in time; this group is of no use then.
        """
        whole = self._known[device, -1]
        self._splits += 1
        name = self._member.group if child is None else child._member.group
        part = whole.split(color, key, name)
        if part is not None and child is not None:
            child._take(device, -1, part, f"{whole.instance}-{self._splits}-{color}")
            child._open_region(device)

    def issue(self, operations: Sequence[Operation], stream: int, device: int, pair: int) -> None:
        """Puts operations on a stream, together where they are several.

        Args:
            operations: What to do, at least one.
            stream: Handle of the stream, which is current.
            device: Index of its device.
            pair: As it was prepared.

        Raises:
            TypeError: NCCL has no such reduction; nothing was put on the stream.
            ValueError: No algorithm can serve a call as it is asked for; nothing was put on the stream.
            DistBackendError: NCCL failed, or the group was aborted.
        """
        communicator = self._known[device, pair]
        if pair < 0:
            operations = self._left_to_nccl(operations, stream, device)
        if not operations:
            return
        if len(operations) == 1:
            self._call(communicator, operations[0], stream, pair)
        else:
            with communicator.group():
                for operation in operations:
                    self._call(communicator, operation, stream, pair)

    def _left_to_nccl(
        self, operations: Sequence[Operation], stream: int, device: int
    ) -> Sequence[Operation]:
        """Puts the all-reduces on the stream that are not NCCL's own, and returns the other operations."""
        reduces = self.all_reduces[device]
        if reduces.is_idle:
            options = current_options()
            if options is NO_OPTIONS or options == NO_OPTIONS:
                return operations
        if len(operations) == 1:
            collective, kind, number, _, _, _, source, count, target, _ = operations[0]
            if collective != _ALL_REDUCE:
                return operations
            task = (_DTYPES[kind], C.REDUCE_OPS[number], source, target, count)
            return operations if reduces.serve((task,), stream) else ()
        indices = [index for index, one in enumerate(operations) if one[0] == _ALL_REDUCE]
        if not indices:
            return operations
        tasks: list[Task] = []
        for index in indices:
            _, kind, number, _, _, _, source, count, target, _ = operations[index]
            tasks.append((_DTYPES[kind], C.REDUCE_OPS[number], source, target, count))
        left = {indices[at] for at in reduces.serve(tasks, stream)}
        taken = set(indices) - left
        return [one for index, one in enumerate(operations) if index not in taken]

    def close(self) -> None:
        """Destroys what lives; what was aborted is left alone."""
        for reduces in self.all_reduces.values():
            reduces.close()
        self.all_reduces.clear()
        for communicator in self._known.values():
            if isinstance(communicator, SharedDevice):
                communicator.destroy()
            elif communicator.closed is None and self.communicators.remove(communicator.handle):
                communicator.ended_elsewhere = None
                try:
                    communicator.destroy()
                except Exception as error:
                    _log.warning(self._member.says("destroy", str(error)))
            else:
                communicator.forget("the group was aborted")
        self._known.clear()

    def _call(
        self, communicator: NcclCommunicator, operation: Operation, stream: int, pair: int
    ) -> None:
        collective, kind, number, root, factor, where, source, count, target, out_count = operation
        dtype = _DTYPES[kind]
        if collective == _ALL_REDUCE:
            op = self._reduction(kind, number, factor, where)
            communicator.all_reduce(source, target, count, dtype, op, stream)
        elif collective == _ALL_GATHER:
            communicator.all_gather(source, target, count, dtype, stream)
        elif collective == _REDUCE_SCATTER:
            op = self._reduction(kind, number, factor, where)
            communicator.reduce_scatter(source, target, out_count, dtype, op, stream)
        elif collective == _BROADCAST:
            # Both on all ranks: NCCL registers what it is given, and all must give the same.
            send, receive = source or target, target or source
            communicator.broadcast(send, receive, count or out_count, dtype, root, stream)
        elif collective == _REDUCE:
            op = self._reduction(kind, number, factor, where)
            communicator.reduce(source, target or source, count, dtype, op, root, stream)
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

    def _reduction(self, kind: int, number: int, factor: float, where: int) -> object:
        """Returns what a communicator takes; looked up once, as it costs as much as the call of NCCL."""
        known = self._reductions.get((kind, number))
        if known is not None:
            return known
        if number == _PREMUL_SUM:
            return FactorOnDevice(where) if where else dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        op = _OPS[number]
        with contextlib.suppress(TypeError):  # which the communicator raises, in its own name
            self._reductions[kind, number] = reduced(_DTYPES[kind], op)
        return op

    def _for_all(self, device: torch.device) -> NcclCommunicator:
        generation = self._generation(-1)
        return communicator_of(
            self._store, self._member, device, self._timeout, generation, self._over
        )

    def _generation(self, pair: int) -> int:
        """Returns how many communicators these ranks have begun to make before."""
        self._made[pair] += 1
        return self._made[pair] - 1

    def _for_pair(self, device: torch.device, peer: int) -> NcclCommunicator:
        low, high = sorted((self._member.rank, peer))
        two = f"{self._member.group}, ranks {low} and {high}"
        member = Member(two, int(self._member.rank == high), 2)
        store = PrefixStore(f"pair/{low}-{high}", self._store)
        generation = self._generation(peer)
        return communicator_of(store, member, device, self._timeout, generation, self._over)


# After the import of what aborts communicators at exit, hence called before it: groups close theirs first.
atexit.register(C._shutdown_all)
