"""``python -m fastcoll.bench objects``: objects by torch's calls, and by fastcoll's communicator.

``gloo`` and ``fastcoll`` are torch's calls on these backends,
``fastcoll-direct`` is the communicator. A broadcast takes the time of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._communicator import communicator
from fastcoll._measure import Call, take_turn
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import Candidate, Run
from fastcoll.bench.table import Column, Table

__all__ = ["CALLS", "OBJECTS", "compare_objects"]

OBJECTS: Mapping[str, Callable[[], Any]] = {
    "dict of 1 KB": lambda: {str(number): float(number) for number in range(64)},
    "bytes of 1 KB": lambda: Random(0).randbytes(1 << 10),
    "bytes of 8 MB": lambda: Random(0).randbytes(8 << 20),
    "tensor of 8 MB": lambda: torch.arange(1 << 21, dtype=torch.float32),
    "array of 8 MB": lambda: torch.arange(1 << 21, dtype=torch.float32).numpy(),
}
CALLS = ("broadcast", "all_gather")


def _bind(name: str, value: Any, peer: Peer) -> Callable[[], Any]:
    """Returns a call that returns the object of rank 0."""
    if peer.way == "direct":
        comm = communicator(peer.group)
        if name == "broadcast":
            return partial(comm.broadcast_object, value, 0)
        return lambda: comm.all_gather_object(value)[0]
    rank, ranks = dist.get_rank(peer.group), dist.get_world_size(peer.group)

    def broadcast() -> Any:
        objects = [value if rank == 0 else None]
        dist.broadcast_object_list(objects, 0, group=peer.group)
        return objects[0]

    def all_gather() -> Any:
        objects = [None] * ranks
        dist.all_gather_object(objects, value, group=peer.group)
        return objects[0]

    return broadcast if name == "broadcast" else all_gather


def _equal(one: Any, other: Any) -> bool:
    same = one == other
    return bool(same if isinstance(same, bool) else same.all())


def _candidate(run: Run, name: str, value: Any, peer: Peer) -> Candidate:
    call = _bind(name, value, peer)
    verify = (lambda: 0 if _equal(call(), value) else 1) if run.options.check else None
    return Candidate(partial(take_turn, call, run.device), verify)


def _measure_case(run: Run, name: str, kind: str, advance: Call) -> dict[str, Any]:
    value = OBJECTS[kind]()
    makers = {peer.name: partial(_candidate, run, name, value, peer) for peer in run.peers}
    slowest = name == "broadcast"
    found, unsupported, disturbed = run.compare(makers, {}, slowest, advance)
    across = "slowest" if slowest else "median"
    case = {"collective": f"{name}_object", "object": kind, **disturbed, "across_ranks": across}
    return {**case, "backends": found, "unsupported": unsupported}


def compare_objects(run: Run) -> int:
    """Measures all calls with all objects, and prints a line for each backend; returns the exit status."""
    table = Table(
        Column("call", -20), Column("object", -16), Column("by", -16), Column("us", 10, 1)
    )
    run.say(*table.head())
    turns = len(CALLS) * len(OBJECTS) * run.plan.turns * len(run.peers)
    with run.progress(turns) as advance:
        for name in CALLS:
            for kind in OBJECTS:
                row = _measure_case(run, name, kind, advance)
                lines = [
                    table.row([row["collective"], kind, backend, one["time"]["median"]])
                    for backend, one in row["backends"].items()
                ]
                run.add(row, row["backends"].values(), lines)
    return run.finish()
