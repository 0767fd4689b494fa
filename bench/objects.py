"""``python -m fastcoll.bench.objects``: objects by torch's calls, and by fastcoll's communicator.

The options are those of ``python -m fastcoll.bench``. ``gloo`` and ``fastcoll`` are torch's calls on these backends,
``fastcoll-direct`` is the communicator. A broadcast takes the time of the slowest rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._communicator import communicator
from fastcoll._launch import run_or_launch
from fastcoll._measure import Call, take_turn
from fastcoll.bench.options import parse
from fastcoll.bench.peer import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.record import command_line
from fastcoll.bench.run import Candidate, Run, open_run
from fastcoll.bench.table import Column, Table

__all__ = ["CALLS", "OBJECTS", "main", "run_rank"]

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


def run_rank(arguments: list[str]) -> int:
    """Runs one rank, in a process with the environment variables that torchrun sets; returns the exit status."""
    table = Table(
        Column("call", -20), Column("object", -16), Column("by", -16), Column("us", 10, 1)
    )
    with open_run(_options(arguments), arguments) as run:
        if run.rank == 0:
            run.record["command"] = command_line("fastcoll.bench.objects", arguments)
        run.say(*table.head())
        turns = len(CALLS) * len(OBJECTS) * run.plan.turns * len(run.peers)
        with progress_bar("fastcoll.bench.objects", turns, run.rank == 0) as advance:
            for name in CALLS:
                for kind in OBJECTS:
                    row = _measure_case(run, name, kind, advance)
                    lines = [
                        table.row([row["collective"], kind, backend, one["time"]["median"]])
                        for backend, one in row["backends"].items()
                    ]
                    run.add(row, row["backends"].values(), lines)
        return run.finish()


def _options(arguments: list[str]) -> Any:
    return parse(["barrier", "--backend", "fastcoll,fastcoll-direct,gloo", *arguments], ())


def main(arguments: list[str] | None = None) -> int:
    """Runs one rank if RANK is set, else starts ``--nproc`` ranks; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_or_launch("fastcoll.bench.objects", run_rank, arguments, _options(arguments).nproc)


if __name__ == "__main__":
    sys.exit(main())
