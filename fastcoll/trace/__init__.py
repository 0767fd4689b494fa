"""The last collectives and messages of this process, and the rank that differed.

Every group keeps a trace of its last FASTCOLL_TRACE_SIZE calls, at a cost of some 0.05 to 0.2 us a call. An entry has
the sequence number, sizes, state and times, and with FASTCOLL_TRACE_STACKS=1 the Python stack. ``fastcoll top PID`` and
``fastcoll trace --pid PID`` read the traces of a job's ranks while it runs or hangs. With FASTCOLL_TRACE_DUMP each rank
writes its trace to a file when a group fails, and ``fastcoll trace PREFIX`` compares the files of all ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from fastcoll.trace.flight_recorder import flight_recorder
from fastcoll.trace.lateness import RankState, Waits
from fastcoll.trace.memory import load
from fastcoll.trace.processes import read_job

__all__ = ["RankState", "dump", "records", "waits"]


def dump(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns the trace of this process, and writes it to a file if ``path`` is given.

    Args:
        path: The file, for ``fastcoll trace``: a prefix that all ranks share, and the rank after it.

    Returns:
        The keys of torch's flight recorder, version 2.10: "entries", "pg_config", "pg_status" and "version". The key
        "fastcoll" has the values without a key in the flight recorder.

    Raises:
        RuntimeError: The trace is empty: there was no group yet, or FASTCOLL_TRACE_SIZE is 0.
        ValueError: The file cannot be written.
    """
    compiled = sys.modules.get("fastcoll._C")  # not loaded: there is no group of fastcoll
    content = b"" if compiled is None else compiled.trace_dump("asked for")
    if not content:
        raise RuntimeError(
            "fastcoll.trace.dump: nothing is recorded. Make a group first, and leave FASTCOLL_TRACE_SIZE above 0."
        )
    if path is not None and compiled is not None:
        content = Path(compiled.trace_write("asked for", os.fspath(path))).read_bytes()
    return flight_recorder(load(content))


def records() -> list[dict[str, Any]]:
    """Returns the entries of ``dump``, oldest first; an empty list if the trace is empty."""
    try:
        found: list[dict[str, Any]] = dump()["entries"]
    except RuntimeError:
        return []
    return found


def waits() -> list[RankState]:
    """Returns the state of each rank of this job on this host, and what the others have waited for it; by rank.

    Shares and rates are those of the calls that the traces keep. ``fastcoll top`` shows the same of another process.

    Raises:
        ValueError: This process has no trace, or its parent has started the ranks of two jobs.
    """
    moment = time.monotonic_ns()
    return Waits().look(read_job([os.getpid()]), moment)
