"""What ranks do in the tests of the trace, and how torch's analyser is asked about their dumps."""

import gc
import io
import logging
import pickle
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import TORCH, all_gather_single, reduce_scatter_single
from torch.distributed.flight_recorder.fr_trace import main as torchfrtrace

from fastcoll.trace.__main__ import main


def ask_torch(folder: Path, output: Path) -> tuple[list[str], list[object]]:
    """Return what torchfrtrace prints of dumps t_<rank>, and the collectives that it matched."""
    if TORCH < (2, 13):
        pytest.skip(f"torch {TORCH[0]}.{TORCH[1]} has no torchfrtrace for a backend but NCCL")
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    heard = Heard()
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(heard)
    try:
        with redirect_stdout(io.StringIO()):
            main([f"{folder}/t_", "--flight-recorder", f"{folder}/torch_"])
        torchfrtrace([str(folder), "--prefix", "torch_", "-o", str(output)])
    finally:
        logger.removeHandler(heard)
        gc.enable()  # it switches it off
    _, database = pickle.loads(output.read_bytes())
    return said, database.collectives


def every_kind(rank: int, size: int) -> list[str]:
    """Call each kind of collective and message once or more; return their names in the trace."""
    ones = torch.ones
    dist.all_reduce(ones(4, 2))
    dist.all_reduce(ones(1), async_op=True).wait()
    dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (5,), check_invariants=True))
    dist.broadcast(ones(3), 1)
    dist.reduce(ones(3), 1)
    dist.all_gather([ones(3) for _ in range(size)], ones(3))
    all_gather_single(ones(3 * size), ones(3))
    dist.gather(ones(4), [ones(4) for _ in range(size)] if rank == 0 else None, 0)
    dist.scatter(ones(4), [ones(4) for _ in range(size)] if rank == 0 else None, 0)
    dist.reduce_scatter(ones(2), [ones(2) for _ in range(size)])
    dist.reduce_scatter(ones(2 + rank), [ones(2 + i) for i in range(size)])
    reduce_scatter_single(ones(2), ones(2 * size))
    dist.all_to_all([ones(i + 1) for i in range(size)], [ones(rank + 1) for _ in range(size)])
    dist.all_to_all_single(ones(size), ones(size))
    dist.barrier()
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    backend.allreduce_coalesced([ones(3), ones(4)]).wait()
    backend.monitored_barrier()
    return [
        *["all_reduce"] * 3,
        *["broadcast", "reduce", "all_gather", "_all_gather_base", "gather"],
        *["scatter", "reduce_scatter", "reduce_scatter_v", "_reduce_scatter_base"],
        *["all_to_all", "all_to_all", "barrier", "allreduce_coalesced", "barrier"],
    ]
