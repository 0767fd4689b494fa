"""MPI, reached through mpi4py's calls on buffers, on the companion's MPI_COMM_WORLD."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import mpi4py
import torch
from torch import Tensor

# Two threads, one of which calls MPI: a user who asks for more pays for locks. Before MPI is imported.
mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from fastcoll.bench.collectives import Case  # noqa: E402
from fastcoll.bench.control import Control  # noqa: E402
from fastcoll.bench.peer import LocalPeer  # noqa: E402
from fastcoll.bench.turn import Call  # noqa: E402

__all__ = ["MpiPeer"]

_TYPES = {
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float16: MPI.FLOAT16_T,
    torch.bfloat16: MPI.BFLOAT16_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
}
_WORDS = {1: MPI.INT8_T, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MpiPeer(LocalPeer):
    """The MPI that the launcher belongs to."""

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name, control, timeout)
        self._comm: Any = MPI.COMM_WORLD
        if (self._comm.rank, self._comm.size) != (control.rank, control.world_size):
            raise RuntimeError(
                f"rank {control.rank} of {control.world_size} is rank {self._comm.rank} of "
                f"{self._comm.size} to MPI: the launcher belongs to another MPI than mpi4py found"
            )
        self.library = MPI.Get_library_version().strip("\0").splitlines()[0]

    def bind(self, case: Case) -> Call:
        """Returns one blocking call of MPI, in place where the collective is."""
        comm, root, is_root = self._comm, case.root, case.rank == case.root
        send, receive = self._buffer(case, case.send), self._buffer(case, case.receive)
        op = self._op(case)
        match case.collective.name:
            case "all_reduce":
                return partial(comm.Allreduce, MPI.IN_PLACE, receive, op)
            case "all_gather":
                return partial(comm.Allgather, send, receive)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, send, receive, op)
            case "broadcast":
                return partial(comm.Bcast, receive, root)
            case "all_to_all":
                return partial(comm.Alltoall, send, receive)
            case "sendrecv":
                to, source = case.rank + 1, case.rank - 1
                ranks = case.world_size
                return partial(
                    comm.Sendrecv, send, to % ranks, recvbuf=receive, source=source % ranks
                )
            case "barrier":
                return partial(comm.Barrier)
            case "reduce":
                if is_root:
                    return partial(comm.Reduce, MPI.IN_PLACE, receive, op, root)
                return partial(comm.Reduce, send, None, op, root)
            case "gather":
                return partial(comm.Gather, send, receive if is_root else None, root)
            case "scatter":
                return partial(comm.Scatter, send if is_root else None, receive, root)
        raise NotImplementedError(f"{case.collective.name} is not known to {type(self).__name__}")

    def _buffer(self, case: Case, tensor: Tensor) -> list[Any]:
        """Returns memory and type; what is only moved goes as words of the same width."""
        kind = _TYPES[case.dtype] if case.collective.reduces else _WORDS[case.dtype.itemsize]
        if kind == MPI.DATATYPE_NULL:
            raise NotImplementedError(f"this MPI has no type for {case.dtype}")
        return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), kind]

    def _op(self, case: Case) -> Any:
        if case.collective.reduces and case.op not in _OPS:
            raise NotImplementedError(f"MPI has no reduction {case.op!r}")
        return _OPS.get(case.op)

    def close(self) -> None:
        """Finalizes MPI, together with the other ranks."""
        MPI.Finalize()
