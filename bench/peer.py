"""The backends of torch.distributed that are compared, each with its own group in the process of the rank."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastcoll._communicator import communicator
from fastcoll._group_backend import all_gather_flat, reduce_scatter_flat
from fastcoll._measure import Call
from fastcoll._version import __version__
from fastcoll.bench.collectives import Case
from fastcoll.bench.training import WAYS, missing_way
from fastcoll.shared_tensor import empty_shared

__all__ = ["Peer", "bind", "exchange", "in_shared", "round_trip"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


DIRECT = ("direct", "plan", "op")
_REGISTERED_BY = {
    "fastcoll": "fastcoll._load",
    "fake": "torch.testing._internal.distributed.fake_pg",
}


def bind(case: Case, group: dist.ProcessGroup | None, async_op: bool = False) -> Call:
    """Returns the call that a user would write; asynchronous, it returns a work, except for "sendrecv"."""
    send, receive = case.send, case.receive
    root, rank, ranks = case.root, case.rank, case.world_size
    op = _OPS.get(case.op)
    given: Any = {"group": group, "async_op": async_op}

    def chunks(whole: Tensor) -> list[Tensor] | None:
        return list(whole.chunk(ranks)) if rank == root else None

    calls: dict[str, Callable[[], Call]] = {
        "all_reduce": lambda: partial(dist.all_reduce, receive, op, **given),
        "all_gather": lambda: partial(all_gather_flat, receive, send, **given),
        "reduce_scatter": lambda: partial(reduce_scatter_flat, receive, send, op, **given),
        "broadcast": lambda: partial(dist.broadcast, receive, root, **given),
        "all_to_all": lambda: partial(dist.all_to_all_single, receive, send, **given),
        "sendrecv": lambda: exchange(send, (rank + 1) % ranks, receive, (rank - 1) % ranks, group),
        "barrier": lambda: partial(dist.barrier, **given),
        "reduce": lambda: partial(dist.reduce, receive, root, op, **given),
        "gather": lambda: partial(dist.gather, send, chunks(receive), root, **given),
        "scatter": lambda: partial(dist.scatter, receive, chunks(send), root, **given),
    }
    return calls[case.collective.name]()


def bind_direct(case: Case, group: dist.ProcessGroup | None, planned: bool) -> Call:
    """Returns a call of fastcoll's communicator; `planned`: a plan."""
    comm, op = communicator(group), _OPS.get(case.op)
    send, receive, root = case.send, case.receive, case.root
    rank, ranks = case.rank, case.world_size
    here = rank == root
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (receive, op),
        "all_gather": (receive, send),
        "reduce_scatter": (receive, send, op),
        "broadcast": (receive, root),
        "all_to_all": (receive, send),
        "sendrecv": (send, (rank + 1) % ranks, receive, (rank - 1) % ranks),
        "barrier": (),
        "reduce": (receive, root, op),
        "gather": (receive if here else None, send, root),
        "scatter": (receive, send if here else None, root),
    }
    name = case.collective.name
    if planned:
        plan: Call = getattr(comm, f"{name}_plan")(*arguments[name])
        return plan
    return partial(getattr(comm, name), *arguments[name])


def bind_operator(case: Case, group: dist.ProcessGroup) -> Call:
    """Returns a call of an operator of ``torch.ops.fastcoll`` that writes into the case's tensors."""
    name, operators = group.group_name, torch.ops.fastcoll
    send, receive = case.send, case.receive
    op = "product" if case.op == "prod" else case.op
    calls: dict[str, Call] = {
        "all_reduce": partial(operators.all_reduce_, receive, op, name),
        "all_gather": partial(operators.all_gather_out, send, name, out=receive),
        "reduce_scatter": partial(operators.reduce_scatter_out, send, op, name, out=receive),
        "all_to_all": partial(operators.all_to_all_out, send, [], [], name, out=receive),
    }
    if case.collective.name not in calls:
        raise ValueError(f"torch.ops.fastcoll has no {case.collective.name}")
    return calls[case.collective.name]


def exchange(
    send: Tensor, target: int, receive: Tensor, source: int, group: dist.ProcessGroup | None
) -> Call:
    """Returns a call that sends to one rank while it receives from another.

    On a device the two calls must be grouped; CPU backends have no groups of calls.
    """
    pair = [(dist.isend, send, target), (dist.irecv, receive, source)]
    operations = [dist.P2POp(*each, group) for each in pair]

    def apart() -> None:
        sending, receiving = (act(tensor, peer, group) for act, tensor, peer in pair)
        assert sending is not None and receiving is not None  # this rank belongs to the group
        receiving.wait()
        sending.wait()

    def grouped() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return apart if send.device.type == "cpu" else grouped


def round_trip(
    send: Tensor, receive: Tensor, ends: Sequence[int], group: dist.ProcessGroup | None = None
) -> Call:
    """Returns a call that sends from the first end to the second, and then back; empty on other ranks."""
    rank = dist.get_rank(group)

    def call() -> None:
        if rank == ends[0]:
            dist.send(send, ends[1], group)
            dist.recv(receive, ends[1], group)
        elif rank == ends[1]:
            dist.recv(receive, ends[0], group)
            dist.send(send, ends[0], group)

    return call


def in_shared(case: Case, group: dist.ProcessGroup) -> Case:
    """Returns the case with buffers that peers of a group of fastcoll read in place."""

    def like(tensor: Tensor) -> Tensor:
        return empty_shared(tensor.numel(), dtype=tensor.dtype, group=group)

    send = like(case.send)
    receive = send if case.receive is case.send else like(case.receive)
    return replace(case, send=send, receive=receive)


class Peer:
    """A backend of ``torch.distributed``, connected to all ranks of the run.

    Args:
        name: The word of the command line: a backend, and after a hyphen a way to train, "shared" for buffers that
            peers read in place, "direct" or "plan" for the calls of ``fastcoll.communicator``, "op" for
            ``torch.ops.fastcoll``, "compile" for ``fastcoll.compile``, or "digest"
            for FASTCOLL_DIGEST=all. "unreduced" is DDP without any reduction.
            "fake" does nothing: the cost of torch's own path to any backend.
        timeout: Limit of each call.

    Attributes:
        backend: The backend's name among torch's.
        way: The word after the hyphen, or "".
        group: The process group, which ``ddp`` needs; None if there is none.
        library: Name and version of the measured library.
    """

    group: dist.ProcessGroup | None = None
    library: str

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name = name
        self.backend, self.way = self.parts(name)
        version = __version__ if self.backend == "fastcoll" else f"of torch {torch.__version__}"
        self.library = "none" if self.way == "unreduced" else f"{self.backend} {version}"
        options = None
        if self.way == "digest":
            from fastcoll._load import C

            options = C.Options(digest="all")
        self.group = dist.new_group(backend=self.backend, timeout=timeout, pg_options=options)

    @classmethod
    def parts(cls, name: str) -> tuple[str, str]:
        """Returns backend and way; DDP compares the models of the ranks once, even without any reduction."""
        backend, _, way = ("gloo-unreduced" if name == "unreduced" else name).partition("-")
        return backend, way

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Returns the reason if this process cannot load the backend, or ""; makes no connection."""
        backend, way = cls.parts(name)
        try:
            if backend in _REGISTERED_BY:
                importlib.import_module(_REGISTERED_BY[backend])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if backend not in dist.Backend.backend_list:
            return "torch.distributed has no backend of that name"
        if not dist.is_backend_available(backend):
            return "this torch was built without it"
        if backend == "nccl" and device.type != "cuda":
            return "it moves CUDA tensors only: run with --device cuda"
        if way in ("shared", "unreduced") and device.type != "cpu":
            return "it is for CPU tensors"
        if way in (*DIRECT, "compile", "digest"):
            return "" if backend == "fastcoll" else f"only fastcoll has {way}"
        return missing_way(way)

    @property
    def delivers(self) -> bool:
        """Whether it moves data between ranks."""
        return self.backend != "fake" and self.way != "unreduced"

    @property
    def trains(self) -> bool:
        """Whether DistributedDataParallel can be made on its group, as it needs works with results."""
        return self.group is not None and self.backend != "fake"

    def place(self, case: Case) -> Case:
        """Returns the case, or the same case on this backend's own buffers."""
        if self.group is None or (self.backend, self.way) != ("fastcoll", "shared"):
            return case
        return in_shared(case, self.group)

    def bind(self, case: Case) -> Call:
        """Returns a call without arguments that does the whole collective, ready to be timed."""
        if self.way == "op" and self.group is not None:
            return bind_operator(case, self.group)
        if self.way in DIRECT:
            return bind_direct(case, self.group, self.way == "plan")
        return bind(case, self.group)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Returns the model with its gradients averaged over the ranks; options are DDP's."""
        return WAYS[self.way](model, self.group, **options)

    def close(self) -> None:
        """Destroys the group, and collects it before the interpreter ends, because gloo may abort then."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None
        gc.collect()
