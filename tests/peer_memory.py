"""Peer-mapped memory without a GPU: files that all ranks map, and interpreted kernels.

The engine's tensors are on the recording device, whose memory is host memory; kernels use the same memory as CPU
memory. Kernel accesses are reported to the recording device (kernel_accesses), which checks the order of streams.
"""

import contextlib
import dataclasses
import json
import os
import time
import weakref
from collections.abc import Iterator, Set
from typing import Any

import device_ranks
import recording_device
import torch
from device_calls import reduces_of as reduces_of

DEVICE = "recording:0"


@dataclasses.dataclass(frozen=True, eq=False)
class SharedFiles:
    """Memory of files, in place of fastcoll.cuda.mapping's ``TorchSymmetricMemory``."""

    # Steps that fail here: "atomics", "allocate", "map", "missing"; "hangs": mapping, while it is set.
    refuses: Set[str] = frozenset()
    on_host: str = "one host"  # equal on ranks of the same host
    identity: str = ""  # of this rank's device; "" if ranks may share one

    @contextlib.contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Changes attributes for a block only, because the rank outlives its test."""
        before = {name: getattr(self, name) for name in changes}
        self.__dict__.update(changes)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def host(self) -> str:
        return self.on_host

    def device_identity(self, device: torch.device) -> str:
        return self.identity

    def missing(self) -> str:
        return "nothing is mapped in this test" if "missing" in self.refuses else ""

    def require_atomics(self, device: torch.device, peers: list[str]) -> None:
        if "atomics" in self.refuses:
            raise RuntimeError("no atomics in this test")

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        if "allocate" in self.refuses:
            raise RuntimeError("no memory in this test")
        file = os.memfd_create("region")
        os.ftruncate(file, size)
        memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
        import kernel_accesses

        kernel_accesses.adopt(memory, DEVICE)
        weakref.finalize(memory, kernel_accesses.forget, memory.data_ptr())
        memory.path = f"/proc/{os.getpid()}/fd/{file}"
        memory.closing = weakref.finalize(memory, os.close, file)
        return memory

    def map(self, memory, name, member, store, seconds) -> list[int]:
        store.set(f"file/{member.rank}", memory.path)
        if self.refuses & {"map", "hangs"}:
            store.add("mapped", 1)  # the others do not wait for this rank
            while "hangs" in self.refuses:
                time.sleep(0.01)
            raise RuntimeError("no mapping in this test")
        keys = [f"file/{rank}" for rank in range(member.size)]
        while not store.check(keys):
            time.sleep(0.002)
        paths = [store.get(key).decode() for key in keys]
        memory.mapped = [
            memory
            if rank == member.rank
            else torch.from_file(path, shared=True, size=memory.numel(), dtype=torch.uint8)
            for rank, path in enumerate(paths)
        ]
        store.add("mapped", 1)
        while store.add("mapped", 0) < member.size:
            time.sleep(0.002)
        return [one.data_ptr() for one in memory.mapped]

    def free(self, memory: torch.Tensor) -> None:
        memory.freed = True

    def kernel_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    @contextlib.contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        stream = torch.Stream(DEVICE)
        with stream:
            yield
            stream.synchronize()


MAPPER = SharedFiles()


def table_of(name: str, limits: dict[str, int]) -> str:
    """Returns the path of a tuning table with kernel limits for a device; the file exists in this process only."""
    from fastcoll import tuning

    section = {"name": name, "ranks": 8, "table": limits}
    record = {**tuning.SHIPPED, "device": section}
    file = os.memfd_create("tuning")
    os.write(file, json.dumps(record).encode())
    return f"/proc/self/fd/{file}"


def prepare() -> None:
    """Prepares a rank: device, libraries, and peer-mapped memory."""
    device_ranks.prepare()
    import kernel_accesses
    import quick_interpreter

    quick_interpreter.install()
    from fastcoll.cuda import mapping_decision, symmetric
    from fastcoll.cuda.mapping import MAPPERS
    from fastcoll.cuda.thresholds import Thresholds

    MAPPERS["recording"] = MAPPER
    limits = Thresholds(one_shot_bytes=64 << 10, two_shot_bytes=2 << 20)
    os.environ["FASTCOLL_TUNING"] = table_of("recording", dataclasses.asdict(limits))
    # Regions of about a megabyte, and stages so small that most messages take several pieces.
    mapping_decision.REGION_SIZES = mapping_decision.RegionSizes(3, 2048, 4, 1024, 1 << 20)
    symmetric._TEST_WAIT = 60.0  # interpreters on busy cores
    kernel_accesses.install(DEVICE)
    _share_knowledge()
    _put_tables_on_the_device()


def _share_knowledge() -> None:
    """Makes a thread that gets a call, or a call's result, inherit the device work that the other thread waited for."""
    from fastcoll.cuda.deadline import Call

    def joining(method):
        def call(self):
            recording_device.join_threads()
            return method(self)

        return call

    Call.run, Call.result = joining(Call.run), joining(Call.result)


def _put_tables_on_the_device() -> None:
    """Puts the kernels' tables on the device: interpreted kernels have them on the host, where no order is checked."""
    from fastcoll import buckets

    copied, used_here = buckets._copied, buckets.used_here

    def on_device(host, device, for_every_stream=False):
        table = copied(host, torch.device(DEVICE), for_every_stream)
        seen = recording_device.cpu_view(table)  # for interpreted kernels
        seen.on_device = table  # lives as long
        return seen

    buckets._copied = on_device
    buckets.used_here = lambda table: used_here(getattr(table, "on_device", table))
