"""The backends that are compared, each behind the same small interface.

A backend of ``torch.distributed`` needs no code here; what is reached another way, such as MPI through
mpi4py, is one more class with the members of :class:`Peer` and an entry in :data:`ADAPTERS`. What
cannot be loaded on some rank is left out on all of them, and named with the reason.
"""

from __future__ import annotations

import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.timing import Call

__all__ = ["ADAPTERS", "FakePeer", "Peer", "TorchPeer", "close_peers", "open_peers"]

# The names of torch 2.13, under which 2.11 and 2.12 know the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class Peer(ABC):
    """One backend, connected to all ranks of the run.

    Args:
        name: The word of the command line.
        timeout: Of each call.

    Attributes:
        delivers: Whether results can be verified.
        group: The process group, for what needs one (``ddp``); None where there is none.
    """

    delivers = True
    group: dist.ProcessGroup | None = None

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name = name

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Returns why this process cannot load the backend, or "" if it can; connects to nobody."""
        return ""

    @abstractmethod
    def bind(self, case: Case) -> Call:
        """Returns a call without arguments that does the whole collective, ready to be timed."""

    @abstractmethod
    def close(self) -> None:
        """Disconnects; afterwards the peer is of no use."""


class TorchPeer(Peer):
    """A backend of ``torch.distributed``, in a process group of its own.

    Attributes:
        plugins: Modules whose import registers a name in torch.
    """

    plugins: Mapping[str, str] = {"ccl": "oneccl_bindings_for_pytorch"}

    def __init__(self, name: str, timeout: timedelta) -> None:
        super().__init__(name, timeout)
        self.group = dist.new_group(backend=name, timeout=timeout)

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Asks torch, after importing what registers the name, if anything does."""
        try:
            if name in cls.plugins:
                importlib.import_module(cls.plugins[name])
            if name == "fastcoll":
                import fastcoll._load  # noqa: F401
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if name not in dist.Backend.backend_list:
            return "torch.distributed knows no backend of that name"
        if not dist.is_backend_available(name):
            return "this torch was built without it"
        if name == "nccl" and device.type != "cuda":
            return "it moves CUDA tensors only: run with --device cuda"
        return ""

    def bind(self, case: Case) -> Call:
        """Returns the call a user would write, ``async_op`` left at False."""
        group, send, receive, root = self.group, case.send, case.receive, case.root
        op = _OPS.get(case.op)
        match case.collective.name:
            case "all_reduce":
                return partial(dist.all_reduce, receive, op, group)
            case "all_gather":
                return partial(_all_gather, receive, send, group)
            case "reduce_scatter":
                return partial(_reduce_scatter, receive, send, op, group)
            case "broadcast":
                return partial(dist.broadcast, receive, root, group)
            case "all_to_all":
                return partial(dist.all_to_all_single, receive, send, group=group)
            case "sendrecv":
                return self._bind_sendrecv(case)
            case "barrier":
                return partial(dist.barrier, group)
            case "reduce":
                return partial(dist.reduce, receive, root, op, group)
            case "gather":
                chunks = list(receive.chunk(case.world_size)) if case.rank == root else None
                return partial(dist.gather, send, chunks, root, group)
            case "scatter":
                chunks = list(send.chunk(case.world_size)) if case.rank == root else None
                return partial(dist.scatter, receive, chunks, root, group)
        raise NotImplementedError(f"{case.collective.name} is not known to {type(self).__name__}")

    def _bind_sendrecv(self, case: Case) -> Call:
        """Sends to the next rank while receiving from the one before, as nccl-tests do."""
        ranks = case.world_size
        operations = [
            dist.P2POp(dist.isend, case.send, (case.rank + 1) % ranks, self.group),
            dist.P2POp(dist.irecv, case.receive, (case.rank - 1) % ranks, self.group),
        ]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return exchange

    def close(self) -> None:
        """Destroys the group, collected before the interpreter ends: else gloo may abort then."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None
        gc.collect()


class FakePeer(TorchPeer):
    """torch's "fake" backend, which does nothing: the cost of torch's own path to any backend."""

    delivers = False

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Imports the module that registers it."""
        try:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


class _UnwrittenPeer(Peer):
    """A name that is reserved for an adapter to come."""

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        return "fastcoll.bench has no adapter for it yet"

    def bind(self, case: Case) -> Call:
        raise NotImplementedError

    def close(self) -> None:
        pass


ADAPTERS: Mapping[str, type[Peer]] = {"fake": FakePeer, "mpi": _UnwrittenPeer}
"""What is not simply a backend of torch, by the word of the command line."""


def open_peers(
    names: tuple[str, ...],
    control: Control,
    device: torch.device,
    timeout: timedelta,
    adapters: Mapping[str, type[Peer]] = ADAPTERS,
) -> tuple[list[Peer], dict[str, str]]:
    """Connects the backends, in the order of the names.

    Returns:
        Those that all ranks have, and for the others the reason, the same on all ranks.
    """
    peers: list[Peer] = []
    reasons: dict[str, str] = {}
    for name in names:
        adapter = adapters.get(name, TorchPeer)
        problem = _first(control, adapter.missing(name, device))
        if not problem:
            try:
                peers.append(adapter(name, timeout))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problem = _first(control, problem)
            if problem and peers and peers[-1].name == name:
                peers.pop().close()
        if problem:
            reasons[name] = problem
    return peers, reasons


def close_peers(peers: list[Peer]) -> None:
    """Disconnects all, the last one first."""
    while peers:
        peers.pop().close()


def _first(control: Control, problem: str) -> str:
    """Returns the first rank's problem, naming the rank if it is not that of all; "" if there is none."""
    problems = control.all_gather(problem)
    for rank, text in enumerate(problems):
        if text:
            return str(text) if all(problems) else f"rank {rank}: {text}"
    return ""
