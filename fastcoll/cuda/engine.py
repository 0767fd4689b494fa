"""The Python half of the engine for device tensors: communicators, and plans for the all-reduces that kernels serve.

The C++ half (csrc/cuda/cuda_engine) owns streams, events, works and the watchdog, and calls NCCL. It calls this
half to make communicators, and calls ``AllReduces.plan``, with the stream current, for a kind of call that has no plan
yet. It repeats plans without this half, and keeps the kinds of call that NCCL serves for any tensors.
Nothing here reads a tensor or waits for a stream.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll._load import C
from fastcoll._load_cuda import CUDA
from fastcoll.cuda import mapping_decision, nccl_library
from fastcoll.cuda.all_reduce import AllReduces
from fastcoll.cuda.errors import ABORTED, Member
from fastcoll.cuda.mapping import MAPPERS
from fastcoll.cuda.memory_pools import RegisteredPools
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_config import NcclConfig, shares
from fastcoll.cuda.nccl_init import create_communicator
from fastcoll.cuda.nccl_life import ABORT_SECONDS, DESTROY_SECONDS
from fastcoll.cuda.selector import AUTO
from fastcoll.cuda.symmetric import open_region
from fastcoll.cuda.thresholds import DEFAULT, Thresholds, device_name

__all__ = ["CudaEngine", "engine_of", "engines"]

_log = logging.getLogger("fastcoll.cuda")

_engines: weakref.WeakValueDictionary[str, CudaEngine] = weakref.WeakValueDictionary()


def engine_of(group: str) -> CudaEngine | None:
    """Returns the engine of the group with this name in this process; None before its first call on a device."""
    return _engines.get(group)


def engines() -> list[CudaEngine]:
    """Returns all engines of this process."""
    return list(_engines.values())


@dataclass(eq=False, repr=False)
class CudaEngine:
    """NCCL for one group on this rank.

    The first use of a device, or of a pair of ranks, makes its communicator.

    Attributes:
        store: The group's store.
        group: Name of the group.
        rank: This process in the group.
        size: Number of ranks.
        timeout: How long to wait for the other ranks when a communicator is made.
        device_type: "cuda"; tests pass another one.
        thresholds_on: Returns the algorithms' size limits for a device name.
        algorithm: FASTCOLL_ALGO.
        config: NCCL config of the communicators.
        order: Options.order, with FASTCOLL_ORDER.
        communicators: The communicators that the watchdog polls and aborts, without Python.
        all_reduces: The ``AllReduces`` of each device with a communicator of all ranks, by device index.
        pools: The memory pools that are registered with all communicators.

    Raises:
        ImportError: CuPy or NCCL is missing, or there are two copies of NCCL.
    """

    store: Store
    group: str
    rank: int
    size: int
    timeout: timedelta
    device_type: str = "cuda"
    thresholds_on: Callable[[str], Thresholds] = lambda name: DEFAULT
    algorithm: str = AUTO
    config: NcclConfig | None = None
    order: str = "any"

    def __post_init__(self) -> None:
        self.all_reduces: dict[int, AllReduces] = {}
        self._shares = shares(self.config)  # whether parts of its communicators share resources
        nccl_library.load()
        self.communicators = communicators = CUDA.Communicators(self.group)
        # Without a reference to self, which would keep the engine.
        self._aborted: Callable[[], bool] = lambda: communicators.aborted
        self._abort_cause: Callable[[], str] = lambda: communicators.abort_cause
        self._member = Member(self.group, self.rank, self.size)
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by pair
        self._made: Counter[int] = Counter()  # communicators that each pair's ranks began to make
        self._splits = 0
        self._known: dict[tuple[int, int], NcclCommunicator] = {}
        self.pools = RegisteredPools(communicators, self._known)
        _engines[self.group] = self

    def prepare(self, device: int, pair: int, captured: bool) -> None:
        """Makes the communicator of a device, or of a pair of ranks on it, if there is none.

        Args:
            device: Index of the device.
            pair: The other rank of a pair; -1: all ranks take part.
            captured: Whether the caller's stream is being captured into a graph.

        Raises:
            DistBackendError: NCCL failed, the group was aborted, or a rank did not arrive.
            ValueError: There is no communicator, and none can be made while a stream is being captured.
        """
        key = (device, pair)
        # Pairs do not wait for each other. Communicators of the same ranks are made in turn, because _made counts them.
        with self._making[pair]:
            if key in self._known:
                return
            if self._aborted():
                raise self._member.fault("init", ABORTED)
            if captured:
                raise ValueError(
                    "the first call of a group on a device makes NCCL's communicator, which cannot be captured into "
                    "a graph. Make one call before the capture."
                )
            where = torch.device(self.device_type, device)
            made = self._create(where, pair)
            self._take(device, pair, made, made.instance)
            if pair < 0:
                self._open_region(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long ranks wait for each other, from the next call on."""
        self.timeout = timeout
        for communicator in list(self._known.values()):
            communicator.timeout = timeout.total_seconds()
        for reduces in list(self.all_reduces.values()):
            reduces.timeout = timeout.total_seconds()

    def _open_region(self, device: int) -> None:
        """Agrees with the other ranks on what they can do beside NCCL; the communicator must exist."""
        communicator = self._known[device, -1]
        where = torch.device(self.device_type, device)
        mapper = MAPPERS.get(self.device_type)
        thresholds = self.thresholds_on(device_name(where))
        sizes = mapping_decision.REGION_SIZES
        request = mapping_decision.MappingRequest(self.algorithm, thresholds, sizes, self.order)
        region = open_region(
            PrefixStore(f"region/{communicator.instance}", self.store),
            self._member,
            where,
            self.timeout.total_seconds(),
            request,
            self._abort_cause,
            communicator.instance,
        )
        if region.peers is not None:
            prefix = self._member.message("all_reduce", "")
            words = region.peers.buffers.words
            self.communicators.add_kernels(words, prefix, self._member.size)
        self.all_reduces[device] = AllReduces(
            communicator.member,
            region,
            where,
            where if mapper is None else mapper.kernel_device(where),
            request.algorithm,
            self.order == "fixed",
            self._aborted,
            self.timeout.total_seconds(),
        )
        self.all_reduces[device].timeout = self.timeout.total_seconds()  # if it was set meanwhile

    def _take(self, device: int, pair: int, made: NcclCommunicator, instance: str) -> None:
        """Records a communicator, and adds it to the watchdog's."""
        name = f"of {made.device}" if pair < 0 else f"with rank {pair} on {made.device}"
        with self.pools.lock:  # registers each pool with it exactly once
            if not self.communicators.add(made.calls, device, name, instance, pair):
                made.abort(ABORTED)
                raise self._member.fault("init", ABORTED)
            made.instance = instance
            made.family = self.communicators
            aborted = self._aborted
            made.ended_elsewhere = lambda: ABORTED if aborted() else None
            self._known[device, pair] = made
            self.pools.extend(made)

    def split(self, device: int, color: int, key: int, child: CudaEngine | None) -> None:
        """Splits a device's communicator; all ranks call it.

        Args:
            device: Index of the device.
            color: Ranks with the same color share a new communicator; -1: none for this rank.
            key: Orders the ranks in the new communicator.
            child: The engine of the new group, which gets the communicator.

        Raises:
            DistBackendError: NCCL failed, or a rank did not arrive in time; this group is unusable then.
        """
        whole = self._known[device, -1]
        self._splits += 1
        name = self.group if child is None else child.group
        if child is not None and self._shares:
            child._join(self.communicators)
        part = whole.split(color, key, name, None if child is None else child.config)
        if part is not None and child is not None:
            child._take(device, -1, part, f"{whole.instance}-{self._splits}-{color}")
            child._open_region(device)

    def close(self) -> None:
        """Destroys the live communicators; aborted ones are left alone."""
        for reduces in self.all_reduces.values():
            reduces.close()
        self.all_reduces.clear()
        end = time.monotonic() + DESTROY_SECONDS
        for communicator in self._known.values():
            if communicator.closed is None and self.communicators.remove(communicator.calls):
                communicator.ended_elsewhere = None
                try:
                    communicator.destroy(max(end - time.monotonic(), ABORT_SECONDS))
                except Exception as error:
                    _log.warning(self._member.message("destroy", str(error)))
            else:
                communicator.forget(ABORTED)
        self._known.clear()

    def _create(self, device: torch.device, pair: int) -> NcclCommunicator:
        """Makes a communicator of all ranks, or with the rank `pair`."""
        store, member = self.store, self._member
        if pair >= 0:
            low, high = sorted((member.rank, pair))
            two = f"{member.group}, ranks {low} and {high}"
            member = Member(two, int(member.rank == high), 2)
            store = PrefixStore(f"pair/{low}-{high}", store)
        self._made[pair] += 1
        return create_communicator(
            store,
            member,
            device,
            self.timeout.total_seconds(),
            self._made[pair] - 1,
            self._abort_cause,
            self.config,
            self._parents(device.index) if pair < 0 else (),
            self._join,
        )

    def _parents(self, device: int) -> list[NcclCommunicator]:
        """Returns the communicators of other groups of which this group's first one may be a part."""
        if not self._shares or self._known:  # a second device's may belong to another family
            return []
        found = []
        for other in engines():
            one = other._known.get((device, -1)) if other._shares else None
            # NCCL refuses to share the resources of another network than the config's.
            networks = {getattr(each.config, "net_name", None) for each in (self, other)}
            if one is None or one.closed is not None or len(networks) > 1:
                continue
            if (one.member.rank, one.member.size) == (self._member.rank, self._member.size):
                found.append(one)
        return found

    def _join(self, family: CUDA.Communicators) -> None:
        """Makes the calls of this group in turn with those of a group that it shares resources with."""
        self._shares = True
        self.communicators.join(family)


# Registered after nccl_life's handler, which aborts communicators at exit, so called before it: groups close first.
atexit.register(C._shutdown_all)
