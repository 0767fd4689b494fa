"""Backends that companions of the tests load: gloo, whole or spoiled."""

import os
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.torch_peer import TorchPeer
from fastcoll.bench.turn import Call


class Gloo(TorchPeer):
    """Gloo, in a process group of the companions."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        super().__init__("gloo", control, timeout)
        self.calls = 0

    def bind(self, case: Case) -> Call:
        return partial(self.count, super().bind(case), case)

    def count(self, call: Call, case: Case) -> None:
        self.calls += 1
        call()


class Wrong(Gloo):
    """The last element of every result on rank 1 is off by one."""

    def count(self, call: Call, case: Case) -> None:
        super().count(call, case)
        if case.rank == 1:
            case.receive[-1] += 1


class Dying(Gloo):
    """Ends rank 1 in the midst of the timed calls."""

    def count(self, call: Call, case: Case) -> None:
        super().count(call, case)
        if case.rank == 1 and self.calls == 8:
            print("RuntimeError: the end", flush=True)
            os._exit(3)


class Hanging(Gloo):
    """Stops in the midst of the timed calls."""

    def count(self, call: Call, case: Case) -> None:
        super().count(call, case)
        if case.rank == 1 and self.calls == 8:
            time.sleep(600)


class Unloadable(Gloo):
    """Fails to load on rank 1."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        if control.rank == 1:
            raise ImportError("libnothing.so: cannot open shared object file\nmore")
        self.group = None
