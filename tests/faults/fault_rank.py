"""The side of a rank in the fault tests: what a scenario is given, and what it can look at."""

import contextlib
import dataclasses
import gc
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank
import torch
import torch.distributed as dist
from own_threads import thread_names
from rank import PATIENT


@dataclasses.dataclass(frozen=True)
class Fault:
    """An exception as a test reads it; ``at`` is of the clock that all processes share."""

    kind: str
    bases: tuple[str, ...]
    text: str
    at: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class After:
    """What a rank saw of its group after a fault."""

    again: Fault | None  # what the next collective raised
    state: str  # the group's error, "" if its backend has none to tell
    destroy: float  # seconds that its end took
    left: list[str]  # what remained of it


@dataclasses.dataclass
class Footprint:
    """What a process holds: open files by what they are, threads by name, its children."""

    files: Counter[str]
    threads: Counter[str]
    children: list[int]
    shared_memory: int

    def beyond(self, before: "Footprint") -> list[str]:
        """Return what was not there before."""
        found = [f"file {name} x{n}" for name, n in (self.files - before.files).items()]
        found += [f"thread {name} x{n}" for name, n in (self.threads - before.threads).items()]
        found += [f"child {pid}" for pid in self.children if pid not in before.children]
        if self.shared_memory > before.shared_memory:
            found.append(f"{self.shared_memory - before.shared_memory} mappings of shared memory")
        return found


def footprint() -> Footprint:
    """Return what this process holds now."""
    gc.collect()
    files: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("/memfd:trace.fastcoll"):
                continue  # the trace outlives its groups
            files[link.split(":")[0] if link.startswith(("socket:", "pipe:")) else link] += 1
    children: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            children += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:fastcoll" in line or "/dev/shm/" in line for line in maps)
    return Footprint(files, Counter(thread_names()), children, shared)


def catch(function: Callable[..., Any], *arguments: Any, **named: Any) -> Fault | None:
    """Return what the call raised, or None. KeyboardInterrupt counts."""
    start = time.monotonic()
    try:
        function(*arguments, **named)
    except (Exception, KeyboardInterrupt) as error:
        now = time.monotonic()
        names = tuple(base.__name__ for base in type(error).__mro__)
        text = str(error)
        traceback.clear_frames(error.__traceback__)  # else they keep groups alive
        return Fault(names[0], names, text, now, now - start)
    return None


class Rank(rank.Rank):
    """One rank in a scenario, which looks at what its process holds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before = footprint()

    def store_of(self, rank: int, address: str = "127.0.0.1") -> dist.Store:
        """Return a store that lives in that rank's process, at its host's address."""
        if self.rank == rank:
            store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            self.store("port").set("port", str(store.port))
            return store
        return dist.TCPStore(address, int(self.store("port").get("port")), is_master=False)

    def used(self, name: str = "first", timeout: float = PATIENT, **other: Any) -> None:
        """Make the default group and use it once, so that the ranks are connected and none is in that call still."""
        self.init(name, timeout, **other)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [dist.get_world_size()] * 3
        self.meet(f"used {name}", dist.get_world_size())

    def error_kind(self) -> str:
        """Return what the default group's backend says of its state, "" if it says nothing."""
        group = dist.group.WORLD
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        try:
            return str(backend.get_error()).removeprefix("ErrorType.")
        except (AttributeError, RuntimeError):  # gloo
            return ""

    def left(self, patience: float = 4.0) -> list[str]:
        """Return what is still held beyond the start, after some time to let go of it."""
        end = time.monotonic() + patience
        while (found := footprint().beyond(self.before)) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def leave(self) -> list[str]:
        """Destroy the group; return what is still held then."""
        dist.destroy_process_group()
        return self.left()

    def finish(self) -> None:
        """Leave a group in which everything must have worked; nothing may be left of it."""
        left = self.leave()
        assert left == [], left

    def recover(self, *lost: int) -> After:
        """Leave the faulty group, and use a new one of all ranks but the lost."""
        again = catch(dist.all_reduce, torch.ones(2))
        state = self.error_kind()
        start = time.monotonic()
        dist.destroy_process_group()
        destroy = time.monotonic() - start
        left = self.left()
        everyone = [rank for rank in range(self.size) if rank not in lost]
        self.init("recovered", rank=everyone.index(self.rank), world_size=len(everyone))
        tensor = torch.full((5,), self.rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [sum(r + 1.0 for r in everyone)] * 5, tensor
        dist.destroy_process_group()
        return After(again, state, destroy, left)


def as_test(rank: Rank, test: Callable[..., None], *arguments: Any) -> None:
    """Run a test that has the rank among its arguments, if it wants it."""
    test(*arguments)
