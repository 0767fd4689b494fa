"""Finds the processes of a job by one of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fastcoll.trace.contents import Trace
from fastcoll.trace.live import NoTraceError, read, traced_processes

__all__ = ["ranks_of", "read_job"]


def _parents() -> dict[int, int]:
    """Returns the parent of each process of this host."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:  # the name of the program, in brackets, may hold anything
                found[int(name)] = int(
                    Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    return found


def ranks_of(pids: Sequence[int]) -> list[int]:
    """Returns the traced processes of a job.

    Args:
        pids: One process: torchrun's or another launcher's stands for the ranks that it or its children started, and a
            rank for itself and the other children of its parent. Several processes stand for themselves.

    Raises:
        ProcessLookupError: There is no such process.
        ValueError: It is no process of a job with traces.
    """
    if len(pids) > 1:
        return list(pids)
    (pid,) = pids
    parents, traced = _parents(), set(traced_processes())
    if pid not in parents:
        raise ProcessLookupError(f"there is no process {pid} on this host")
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)

    def below(root: int) -> list[int]:
        return [root, *(found for child in children[root] for found in below(child))]

    found = sorted(traced.intersection(below(pid)))
    if found == [pid] and parents[pid] > 1:
        found = sorted(traced.intersection(children[parents[pid]]))
    if not found:
        read(pid)  # says why it has none, if it is of another user
        raise ValueError(f"process {pid} has started no rank that has a group of fastcoll")
    return found


def read_job(pids: Sequence[int], newest: int | None = None) -> list[Trace]:
    """Returns the traces of ``ranks_of`` these processes, by rank; see ``fastcoll.trace.live.read``.

    Raises:
        ProcessLookupError: All of them have ended.
        ValueError: Two of them are the same rank, so they are of two jobs.
    """
    traces: dict[int, Trace] = {}
    why: Exception = ProcessLookupError("all processes of the job have ended")
    for pid in ranks_of(pids):
        try:
            trace = read(pid, newest)
        except ProcessLookupError:  # it has ended meanwhile
            continue
        except NoTraceError as error:  # of its parent, before a fork
            why = error
            continue
        if trace.rank in traces:
            raise ValueError(
                f"processes {traces[trace.rank].pid} and {pid} are both rank {trace.rank}: they are of two jobs. Pass "
                "the processes of all ranks of one job."
            )
        traces[trace.rank] = trace
    if not traces:
        raise why
    return [traces[rank] for rank in sorted(traces)]
