"""Starts the ranks of a command on this machine, if no launcher has started them, and joins them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from fastcoll._measure import Control

__all__ = ["ALLOCATOR", "join", "launch", "rank_variables"]

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""With these, glibc keeps freed memory. By default it returns large blocks to the kernel at some times only. A step
that makes 100 MB of gradients then takes 5 or 11 ms, whatever the backend does."""


def launch(command: list[str], ranks: int, threads: int = 1) -> int:
    """Runs a command once per rank, as torchrun does, and waits. Each rank keeps the memory that it frees.

    Args:
        command: Program and arguments.
        ranks: Number of ranks.
        threads: With which each rank computes.

    Returns:
        The exit status of the first rank that failed, or 128 plus the signal that ended it; 0 if none failed.
    """
    os.environ.update({**ALLOCATOR, **os.environ, "OMP_NUM_THREADS": str(threads)})
    config = LaunchConfig(
        *(1, 1, ranks),
        run_id="fastcoll",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        status = int(error.get_first_failure()[1].exitcode)
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def rank_variables(
    rank: int, ranks: int, local_rank: int, local_ranks: int, address: str, port: int
) -> dict[str, str]:
    """Returns the environment variables that torchrun sets for a rank; the store is at the address and the port."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
    }


def join(backend: str, timeout: timedelta = default_pg_timeout, options: Any = None) -> Control:
    """Joins the ranks that a launcher has started: makes the default group.

    Args:
        backend: Backend of the default group.
        timeout: Limit of the rendezvous and of the group's calls.
        options: The backend's options.

    Returns:
        A control of all ranks, apart from the group.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        pg_options=options,
    )
    return Control(PrefixStore("control", store), rank, ranks)
