"""``python -m fastcoll.bench.single_copy``: whether the kernel could copy between two ranks faster than fastcoll.

With process_vm_readv a rank reads the other's memory in one copy, without shared memory in between. Both ranks
read the other's buffer at once, as in an exchange by send and recv, which is what fastcoll is timed with; the
third candidate copies as many bytes inside each process, which is the floor. All take turns, as in the other
benchmarks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastcoll.bench.control import Control
from fastcoll.bench.launch import launch
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.options import parse_size
from fastcoll.bench.timing import Plan, measure
from fastcoll.bench.turn import Call, TimedCall

__all__ = ["main", "read_from"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_SIZES = ("64K", "256K", "1M", "4M", "16M", "64M")


class _Span(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read_from(pid: int, address: int, output: Tensor) -> None:
    """Reads `output.nbytes` bytes at `address` of another process into `output`.

    Raises:
        OSError: The kernel does not permit it, or the memory is not there.
    """
    here, there = _Span(output.data_ptr(), output.nbytes), _Span(address, output.nbytes)
    read = _LIBC.process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if done != output.nbytes:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"process_vm_readv({pid}): {os.strerror(number)}, {done} of {output.nbytes} bytes",
        )


def _exchange(send: Tensor, receive: Tensor, peer: int) -> Call:
    operations = [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]

    def call() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def _measure_size(size: int, control: Control, plan: Plan) -> dict[str, Any]:
    rank, peer = control.rank, 1 - control.rank
    send = torch.full((size,), rank + 1, dtype=torch.uint8)
    receive = torch.zeros_like(send)
    theirs = control.all_gather([os.getpid(), send.data_ptr()])[peer]
    calls: dict[str, Call] = {
        "fastcoll": _exchange(send, receive, peer),
        "process_vm_readv": partial(read_from, theirs[0], theirs[1], receive),
        "floor": partial(receive.copy_, torch.zeros_like(send)),
    }
    for name in ("fastcoll", "process_vm_readv"):
        receive.zero_()
        calls[name]()
        if not bool((receive == peer + 1).all()):
            raise RuntimeError(f"{name} delivered wrong bytes on rank {rank}")
        control.barrier()
    cpu = torch.device("cpu")
    timings, lost = measure(
        {name: TimedCall(call, cpu) for name, call in calls.items()}, control, plan, False
    )
    if lost:
        raise RuntimeError(str(lost))
    control.barrier()
    return {"size": size, **{name: asdict(timing.calls) for name, timing in timings.items()}}


def _run_rank(options: argparse.Namespace, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    store, rank, ranks = next(rendezvous("env://"))
    control = Control(PrefixStore("fastcoll.bench", store), rank, ranks)
    dist.init_process_group(
        "fastcoll", store=PrefixStore("groups", store), rank=rank, world_size=ranks
    )
    plan = Plan(options.iterations, options.rounds, 2, 2.0)
    rows = []
    if rank == 0:
        print(f"{'bytes':>10} {'fastcoll':>12} {'readv':>12} {'floor':>12}  microseconds, medians")
    for size in options.sizes:
        row = _measure_size(size, control, plan)
        rows.append(row)
        if rank == 0:
            medians = [row[name]["median"] for name in ("fastcoll", "process_vm_readv", "floor")]
            print(f"{size:>10} " + " ".join(f"{value:12.1f}" for value in medians), flush=True)
    if rank == 0 and options.json:
        record = {
            **describe_run(arguments),
            "command": " ".join(["python -m fastcoll.bench.single_copy", *arguments]),
            "machine": describe_machine(torch.device("cpu")),
            "unit": "microseconds, sizes in bytes",
            "cases": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    control.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Is one of two ranks where RANK is set, and else starts them; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.single_copy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--sizes", default=",".join(_SIZES), help="comma-separated (%(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="timed calls (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="write every statistic")
    options = parser.parse_args(given)
    options.sizes = [parse_size(word) for word in options.sizes.split(",")]
    if "RANK" in os.environ:
        _run_rank(options, given)
        return 0
    return launch([sys.executable, "-m", "fastcoll.bench.single_copy", *given], 2)


if __name__ == "__main__":
    sys.exit(main())
