"""``python -m fastcoll.bench.engine``: the host's time for a collective on CUDA tensors, beside torch's own "nccl".

One rank with one GPU has one group of each backend, and the groups take turns. The issuing thread is timed, in batches
of calls on tensors of 1 KiB. A batch begins when the GPU is idle and is too small to fill its queue, so no call waits
for the device. The reduction is an average, because NCCL launches a kernel for it at one rank too. A graph replay is
one launch with either backend: it shows that a capture adds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager

from fastcoll._measure import Call
from fastcoll.bench.device_timing import time_on_host
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record

__all__ = ["CASES", "bind", "main"]

_BACKENDS = ("fastcoll", "nccl")
_CALLS = 50  # in a batch; each is at most two events and a kernel in a queue of a thousand
_TENSORS = 100  # in a coalesced call
CASES = (
    "all_reduce",
    "all_reduce, async",
    "all_gather, async",
    "reduce_scatter, async",
    "broadcast, async",
    f"all_reduce of {_TENSORS} tensors, coalesced",
)
_REPLAY = "replay of a graph of 10 all_reduce"
_AVG = dist.ReduceOp.AVG

# The names since torch 2.13; 2.11 and 2.12 have the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bind(name: str, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Returns one of ``CASES`` as a call without arguments."""
    ranks = dist.get_world_size(group)
    small = torch.ones(256, device=device)
    large = torch.ones(256 * ranks, device=device)
    tensors = [torch.ones(256, device=device) for _ in range(_TENSORS)]
    given: Any = {"group": group, "async_op": True}

    def coalesced() -> None:
        with _coalescing_manager(group, device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, _AVG, group)
        manager.wait()

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(small, _AVG, group),
        "all_reduce, async": lambda: dist.all_reduce(small, _AVG, **given).wait(),
        "all_gather, async": lambda: _all_gather(large, small, **given).wait(),
        "reduce_scatter, async": lambda: _reduce_scatter(small, large, _AVG, **given).wait(),
        "broadcast, async": lambda: dist.broadcast(small, 0, **given).wait(),
        CASES[-1]: coalesced,
    }
    return calls[name]


def _captured(call: Call) -> Call:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph.replay


def _measure(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Prints the table and returns its rows; the groups have the default group's one rank."""
    groups = {name: dist.new_group(backend=name) for name in _BACKENDS}
    titles = "".join(f"{name:>10}" for name in groups)
    print(f"{'microseconds of the host, medians':45}{titles}{'ratio':>8}")
    rows = []
    for case in (*CASES, _REPLAY):
        calls = {
            name: _captured(bind("all_reduce", group, device))
            if case == _REPLAY
            else bind(case, group, device)
            for name, group in groups.items()
        }
        batch = max(1, _CALLS // (_TENSORS // 4)) if "coalesced" in case else _CALLS
        timings = time_on_host(calls, torch.cuda.synchronize, rounds, batch)
        ours, theirs = (timings[name].median for name in _BACKENDS)
        print(f"{case:45}{ours:10.2f}{theirs:10.2f}{ours / theirs:8.2f}", flush=True)
        rows.append({"case": case, "time": {name: asdict(one) for name, one in timings.items()}})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        The exit status: 0, or 2 if there is no GPU or no NCCL to compare with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.engine", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=40, help="batches of each (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="write every statistic")
    options = parser.parse_args(given)
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("fastcoll.bench.engine: torch finds no CUDA device, or has no NCCL", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    cases = _measure(options.rounds, device)
    dist.destroy_process_group()
    if options.json:
        record = {
            **describe_run(given, "fastcoll.bench.engine"),
            "machine": describe_machine(device),
            "unit": "microseconds of the issuing thread for a call",
            "cases": cases,
        }
        write_record(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
