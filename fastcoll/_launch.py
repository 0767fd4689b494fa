"""Starts the ranks of a command on this machine, where no launcher has."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["ALLOCATOR", "launch"]

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc keeps what is freed. By its own rules it gives large blocks back to the kernel at some times and not at others,
and a step that makes 100 MB of gradients takes 5 or 11 ms, whatever is done with them."""


def launch(command: list[str], ranks: int) -> int:
    """Runs a command once per rank, as torchrun does, and waits. What a rank frees it keeps.

    Args:
        command: Program and arguments.
        ranks: How many.

    Returns:
        The exit status of the first rank that failed, 128 plus the signal if one ended it; else 0.
    """
    os.environ.update({**ALLOCATOR, **os.environ, "OMP_NUM_THREADS": "1"})
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
