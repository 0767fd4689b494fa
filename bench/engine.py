"""``python -m fastcoll.bench.engine``: the host's time for a collective on CUDA tensors, beside torch's own "nccl".

One rank with one GPU has one group of each backend, and the groups take turns. The issuing thread is timed, in batches
of calls on tensors of 1 KiB. A batch begins when the GPU is idle and is too small to fill its queue, so no call waits
for the device. The reduction is an average, because NCCL launches a kernel for it at one rank too. A graph replay is
one launch with either backend: it shows that a capture adds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager

from fastcoll._measure import Call
from fastcoll.bench.collectives import build_case
from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.device_timing import captured, time_on_host
from fastcoll.bench.options import engine_parser
from fastcoll.bench.peer import bind
from fastcoll.bench.record import write_record
from fastcoll.bench.table import Column, Table

__all__ = ["CASES", "call_of", "main"]

_BACKENDS = ("fastcoll", "nccl")
_CALLS = 50  # in a batch; each is at most two events and a kernel in a queue of a thousand
_TENSORS = 100  # in a coalesced call
_COALESCED = f"all_reduce of {_TENSORS} tensors, coalesced"
_ASYNC = tuple(f"{name}, async" for name in ("all_gather", "reduce_scatter", "broadcast"))
CASES = ("all_reduce", "all_reduce, async", *_ASYNC, _COALESCED)
_REPLAY = "replay of a graph of 10 all_reduce"


def call_of(name: str, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Returns one of ``CASES``, or the replay, as a call without arguments."""
    if name == _REPLAY:
        return captured(call_of("all_reduce", group, device), repeats=10)
    if name == _COALESCED:
        tensors = [torch.ones(256, device=device) for _ in range(_TENSORS)]

        def coalesced() -> None:
            with _coalescing_manager(group, device, async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
            manager.wait()

        return coalesced
    collective, _, way = name.partition(", ")
    ranks = group.rank(), group.size()
    case = build_case(collective, 1024 * ranks[1], torch.float32, "avg", *ranks, 0, device)
    case.reset()
    call: Any = bind(case, group, async_op=bool(way))
    return (lambda: call().wait()) if way else call


def _measure(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Prints the table and returns its rows; the groups have the default group's one rank."""
    groups = {name: dist.new_group(backend=name) for name in _BACKENDS}
    columns = [Column(name, 9) for name in (*groups, "ratio")]
    table = Table(Column("microseconds of the host, medians", -45), *columns)
    print(*table.head())
    rows = []
    for case in (*CASES, _REPLAY):
        calls = {name: call_of(case, group, device) for name, group in groups.items()}
        batch = max(1, _CALLS // (_TENSORS // 4)) if case == _COALESCED else _CALLS
        timings = time_on_host(calls, torch.cuda.synchronize, rounds, batch)
        ours, theirs = (timings[name].median for name in _BACKENDS)
        print(table.row([case, ours, theirs, ours / theirs]), flush=True)
        rows.append({"case": case, "time": {name: asdict(one) for name, one in timings.items()}})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        The exit status: 0, or 2 if there is no GPU or no NCCL to compare with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = engine_parser().parse_args(given)
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("fastcoll.bench.engine: torch finds no CUDA device, or has no NCCL", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    cases = _measure(options.rounds, device)
    dist.destroy_process_group()
    if options.json:
        record = describe_run(command_line("fastcoll.bench.engine", given), device)
        unit = "microseconds of the issuing thread for a call"
        write_record(options.json, {**record, "unit": unit, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
