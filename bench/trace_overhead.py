"""``python -m fastcoll.bench.trace_overhead``: what the trace adds to a small all_reduce.

Two groups of ranks, one with the trace and one without it, take turns, so that the machine's noise meets both
alike. Each turn is a block of synchronous all_reduces of 4 bytes; printed are the medians over the turns of the
time of a call, and of the ratio of neighbouring turns. A group of one rank waits for nobody: there the
difference is the trace's own cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.timing import summarise

__all__ = ["main"]


def _serve(
    pipe: Connection, rank: int, size: int, folder: str, trace: dict[str, str], calls: int
) -> None:
    os.environ.update(trace)
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=size)
    tensor = torch.zeros(1)
    while pipe.recv():
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        pipe.send((time.perf_counter() - start) / calls * 1e6)
    dist.destroy_process_group()


class _Group:
    def __init__(self, size: int, trace: dict[str, str], calls: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, self._folder.name, trace, calls)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            self._pipes.append(ours)
            self._ranks.append(process)

    def turn(self) -> float:
        """Returns the microseconds of a call on rank 0."""
        for pipe in self._pipes:
            pipe.send(True)
        times: list[float] = [pipe.recv() for pipe in self._pipes]
        return times[0]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._ranks, strict=True):
            pipe.send(False)
            process.join()
        self._folder.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.trace_overhead", description=__doc__
    )
    parser.add_argument("--turns", type=int, default=200, help="of each group")
    parser.add_argument("--calls", type=int, default=500, help="of a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stacks", action="store_true", help="with Python stacks")
    parser.add_argument("--json", type=Path, default=None, help="write every statistic")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    on = {"FASTCOLL_TRACE_STACKS": "1"} if options.stacks else {}
    groups = [
        _Group(options.ranks, trace, options.calls) for trace in ({"FASTCOLL_TRACE_SIZE": "0"}, on)
    ]
    for group in groups:
        group.turn()
    rows = []
    for turn in range(options.turns):
        # Who goes first takes turns too.
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        times = {which: groups[which].turn() for which in order}
        rows.append((times[0], times[1]))
    for group in groups:
        group.close()
    off, with_trace = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(b / a for a, b in rows)
    extra = statistics.median(b - a for a, b in rows)
    print(
        f"all_reduce of 4 bytes, {options.ranks} ranks, {options.turns} turns of {options.calls} calls, medians"
    )
    print(f"without the trace {off:.3f} us, with it {with_trace:.3f} us")
    best = [min(column) for column in zip(*rows, strict=True)]
    print(
        f"best turns: without {best[0]:.3f} us, with {best[1]:.3f} us, ratio {best[1] / best[0]:.4f}"
    )
    print(
        f"medians of neighbouring turns: ratio {ratio:.4f}, difference {extra * 1e3:.0f} ns a call"
    )
    if options.json:
        record = {
            **describe_run(given),
            "command": " ".join(["python -m fastcoll.bench.trace_overhead", *given]),
            "machine": describe_machine(torch.device("cpu")),
            "unit": "microseconds of a call on rank 0, a sample for each turn; ratio and difference: of neighbours",
            "without": asdict(summarise([row[0] for row in rows])),
            "with": asdict(summarise([row[1] for row in rows])),
            "ratio": asdict(summarise([b / a for a, b in rows])),
            "difference": asdict(summarise([b - a for a, b in rows])),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
