"""Starts the ranks of a run on this machine, where no launcher has."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

__all__ = ["ALLOCATOR", "launch"]

_GRACE = 10.0  # seconds that ranks get to end after one has failed
_INTERRUPTED = 130

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc keeps what is freed. By its own rules it gives large blocks back to the kernel at some times and not at others,
and a step that makes 100 MB of gradients takes 5 or 11 ms, whatever is done with them."""


def launch(command: list[str], ranks: int) -> int:
    """Runs a command once per rank, with torchrun's environment variables, and waits. What a rank frees it keeps.

    Args:
        command: Program and arguments.
        ranks: How many.

    Returns:
        The exit status of the first rank that failed, 128 plus the signal if one killed it; else 0.
    """
    # The store lives here, as under torchrun: no rank can close it while another still asks.
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**ALLOCATOR, **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        return _wait(processes)
    except KeyboardInterrupt:  # the terminal has told the ranks too
        _end(processes)
        return _INTERRUPTED


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status]
        if failed:
            _end(processes)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return 0
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Lets the ranks end by themselves for a while, then ends them."""
    deadline = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
