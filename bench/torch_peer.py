"""The backends of torch.distributed, in the process of the rank itself."""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fastcoll._version import __version__
from fastcoll.bench.candidate import Candidate
from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.peer import Peer
from fastcoll.bench.turn import Call

__all__ = ["FakePeer", "SharedPeer", "TorchPeer"]

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


class TorchPeer(Peer):
    """A backend of ``torch.distributed``, in a process group of its own."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name, control, timeout)
        own = name == "fastcoll"
        self.library = f"fastcoll {__version__}" if own else f"{name} of torch {torch.__version__}"
        self.group = dist.new_group(backend=name, timeout=timeout)

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Asks torch."""
        try:
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
        """Sends to the next rank while receiving from the one before, as nccl-tests do.

        On a device the two calls must be grouped; CPU backends have no groups of calls.
        """
        send, receive, group = case.send, case.receive, self.group
        target, source = (case.rank + 1) % case.world_size, (case.rank - 1) % case.world_size
        operations = [
            dist.P2POp(dist.isend, send, target, group),
            dist.P2POp(dist.irecv, receive, source, group),
        ]

        def exchange() -> None:
            sending = dist.isend(send, target, group)
            receiving = dist.irecv(receive, source, group)
            assert sending is not None and receiving is not None  # this rank belongs to the group
            receiving.wait()
            sending.wait()

        def grouped() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return exchange if send.device.type == "cpu" else grouped

    def close(self) -> None:
        """Destroys the group, collected before the interpreter ends: else gloo may abort then."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None
        gc.collect()


class SharedPeer(TorchPeer):
    """fastcoll with buffers of its own allocator, which peers read where they are: "fastcoll-shared"."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__("fastcoll", control, timeout)
        self.name = name

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Asks as for fastcoll."""
        if device.type != "cpu":
            return "its allocator is for CPU tensors"
        return super().missing("fastcoll", device)

    def prepare(self, case: Case) -> Candidate:
        """Puts other buffers in the place of the case's."""
        send = self._shared(case.send)
        same = case.receive is case.send
        return super().prepare(
            replace(case, send=send, receive=send if same else self._shared(case.receive))
        )

    def _shared(self, like: torch.Tensor) -> torch.Tensor:
        assert self.group is not None
        backend = self.group._get_backend(like.device)
        tensor: torch.Tensor = backend.allocate_tensor(
            like.numel(), dtype=like.dtype, device=like.device
        )
        return tensor


class FakePeer(TorchPeer):
    """torch's "fake" backend, which does nothing: the cost of torch's own path to any backend."""

    delivers = False
    trains = False  # DDP asks its works for tensors

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Imports the module that registers it."""
        try:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
