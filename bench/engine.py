"""``python -m fastcoll.bench.engine``: what a collective on CUDA tensors costs the host, beside torch's own "nccl".

One rank with one GPU, and one group of each backend, which take turns. What is timed is the thread that issues:
batches of calls on tensors of a kilobyte, begun when the GPU is idle and too few to fill its queue, so that no
call waits for the device. The reduction is an average, for which NCCL launches a kernel at one rank too. A graph
replay is one launch whichever backend was captured: it shows that a capture adds nothing of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _coalescing_manager

from fastcoll._measure import Summary, summarise
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record

__all__ = ["CASES", "bind", "main", "measure_host"]

_BACKENDS = ("fastcoll", "nccl")
_CALLS = 50  # of a batch; each is at most two events and a kernel in a queue of a thousand
_TENSORS = 100  # of a coalesced call

Call = Callable[[], object]

# The names of torch 2.13, under which 2.11 and 2.12 know the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_AVG = dist.ReduceOp.AVG


def _waited(call: Callable[[], Any]) -> Call:
    return lambda: call().wait()


def bind(name: str, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Returns one of :data:`CASES` as a call without arguments."""
    ranks = dist.get_world_size(group)
    small = torch.ones(256, device=device)
    large = torch.ones(256 * ranks, device=device)
    tensors = [torch.ones(256, device=device) for _ in range(_TENSORS)]

    def coalesced() -> None:
        with _coalescing_manager(group, device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, _AVG, group)
        manager.wait()

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(small, _AVG, group),
        "all_reduce, async": _waited(lambda: dist.all_reduce(small, _AVG, group, async_op=True)),
        "all_gather, async": _waited(lambda: _all_gather(large, small, group, async_op=True)),
        "reduce_scatter, async": _waited(
            lambda: _reduce_scatter(small, large, _AVG, group, async_op=True)
        ),
        "broadcast, async": _waited(lambda: dist.broadcast(small, 0, group, async_op=True)),
        f"all_reduce of {_TENSORS} tensors, coalesced": coalesced,
    }
    return calls[name]


CASES = (
    "all_reduce",
    "all_reduce, async",
    "all_gather, async",
    "reduce_scatter, async",
    "broadcast, async",
    f"all_reduce of {_TENSORS} tensors, coalesced",
)


def measure_host(
    calls: Mapping[str, Call], synchronize: Call, rounds: int, batch: int = _CALLS
) -> dict[str, Summary]:
    """Times the issuing of calls that take turns.

    Args:
        calls: By name.
        synchronize: Waits for the device.
        rounds: Batches of each.
        batch: Calls of a batch.

    Returns:
        Microseconds of host time for one call, a sample for each batch.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(-2, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            synchronize()
            begin = time.perf_counter_ns()
            for _ in range(batch):
                call()
            took = (time.perf_counter_ns() - begin) / 1e3 / batch
            if turn >= 0:
                samples[name].append(took)
    synchronize()
    return {name: summarise(samples[name]) for name in names}


def _captured(call: Call) -> Call:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph.replay


def _measure(options: argparse.Namespace, given: list[str]) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        groups = {name: dist.new_group(backend=name) for name in _BACKENDS}
        rows: list[dict[str, Any]] = []
        print(
            f"{'microseconds of the host, medians':45}"
            + "".join(f"{n:>10}" for n in groups)
            + f"{'ratio':>8}"
        )
        for case in (*CASES, "replay of a graph of 10 all_reduce"):
            captures = case not in CASES
            calls = {
                name: _captured(bind("all_reduce", group, device))
                if captures
                else bind(case, group, device)
                for name, group in groups.items()
            }
            batch = max(1, _CALLS // (_TENSORS // 4)) if "coalesced" in case else _CALLS
            timings = measure_host(calls, torch.cuda.synchronize, options.rounds, batch)
            medians = {name: timing.median for name, timing in timings.items()}
            ratio = medians["fastcoll"] / medians["nccl"]
            times = "".join(f"{medians[name]:10.2f}" for name in groups)
            print(f"{case:45}{times}{ratio:8.2f}", flush=True)
            rows.append(
                {
                    "case": case,
                    "time": {name: asdict(timing) for name, timing in timings.items()},
                }
            )
        if options.json:
            record = {
                **describe_run(given, "fastcoll.bench.engine"),
                "machine": describe_machine(device),
                "unit": "microseconds of the issuing thread for a call",
                "cases": rows,
            }
            write_record(options.json, record)
        dist.destroy_process_group()
    return 0


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
    return _measure(options, given)


if __name__ == "__main__":
    sys.exit(main())
