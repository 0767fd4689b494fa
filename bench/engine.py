"""``python -m fastcoll.bench.engine``: the host's time for a collective on CUDA tensors, beside torch's own "nccl".

One rank with one GPU has one group of each backend, and the groups take turns. The issuing thread is timed, in batches
of calls on tensors of 1 KiB. A batch begins when the GPU is idle and is too small to fill its queue, so no call waits
for the device. A graph replay is one launch with either backend: it shows that a capture adds nothing.

A call of one rank that changes nothing launches nothing. So all_reduce has a factor, by PREMUL_SUM, and the other calls
are out of place. With one rank fastcoll uses no second stream, which several ranks have in asynchronous calls.

Several ranks reduce a list of small tensors as one bucket. One rank gains nothing by it, so a second group of fastcoll
is made with FASTCOLL_ALGO=nccl, by which one rank does the same. Its row is compared with the list as it is.

``NCCL alone`` is NCCL's function by CuPy's binding, without torch: the least that a backend can take. torch's flight
recorder is on or off for a whole process. So ``nccl, no recorder`` is measured before the others, in its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

from fastcoll._measure import Call
from fastcoll.bench.collectives import build_case
from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.derived import ENGINE_COLUMNS
from fastcoll.bench.device_timing import captured, time_on_host
from fastcoll.bench.options import script_parser
from fastcoll.bench.peer import bind
from fastcoll.bench.record import read_record, write_record
from fastcoll.bench.table import Column, Table
from fastcoll.cuda import nccl_library

__all__ = ["CASES", "BareNccl", "call_of", "main"]

_BARE, _UNRECORDED = ENGINE_COLUMNS[2:]
_NO_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0"}
"""Read once in a process, by torch's FlightRecorder.hpp."""
_AVERAGE = 4  # ncclAvg, which CuPy does not name
_CALLS = 50  # in a batch; each is at most two events and a kernel in a queue of a thousand
_TENSORS = 100  # in a coalesced call
_COALESCED = f"all_reduce of {_TENSORS} tensors, coalesced"
_ASYNC = tuple(f"{name}, async" for name in ("all_gather", "reduce_scatter"))
_BUCKET = f"{_COALESCED}, as one bucket"
CASES = ("all_reduce", "all_reduce, async", *_ASYNC, _COALESCED, _BUCKET)
_REPLAY = "replay of a graph of 10 all_reduce"


def call_of(name: str, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Returns one of ``CASES``, or the replay, as a call without arguments."""
    if name == _REPLAY:
        return captured(call_of("all_reduce", group, device), repeats=10)
    factor = _make_nccl_premul_sum(1.0)
    if name in (_COALESCED, _BUCKET):
        tensors = [torch.ones(256, device=device) for _ in range(_TENSORS)]

        def coalesced() -> None:
            with _coalescing_manager(group, device, async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, factor, group)
            manager.wait()

        return coalesced
    collective, _, way = name.partition(", ")
    ranks = group.rank(), group.size()
    case = build_case(collective, 1024 * ranks[1], torch.float32, "avg", *ranks, 0, device)
    case.reset()
    call: Any = bind(case, group, async_op=bool(way))
    if collective == "all_reduce":
        call = partial(dist.all_reduce, case.receive, factor, group, bool(way))
    return (lambda: call().wait()) if way else call


def bucket_group(device: torch.device) -> dist.ProcessGroup:
    """Returns a group of fastcoll in which one rank uses buckets, as several ranks do."""
    before = os.environ.get("FASTCOLL_ALGO")
    os.environ["FASTCOLL_ALGO"] = "nccl"
    try:
        group: dist.ProcessGroup = dist.new_group(backend="fastcoll")
        dist.all_reduce(torch.ones(1, device=device), group=group)  # reads it
    finally:
        if before is None:
            del os.environ["FASTCOLL_ALGO"]
        else:
            os.environ["FASTCOLL_ALGO"] = before
    return group


class BareNccl:
    """NCCL's functions by CuPy's binding, on a communicator of one rank.

    Args:
        device: Device of the tensors.
        stream: Handle of the stream.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self._nccl = nccl_library.load().cupy
        self._comm = self._nccl.NcclCommunicator(1, self._nccl.get_unique_id(), 0)
        self._space = torch.ones(2 * _TENSORS, 256, device=device)
        self._stream = stream

    def call_of(self, name: str) -> Call | None:
        """Returns one of ``CASES`` as a call without arguments; None for the replay, in which NCCL has no part."""
        kind = self._nccl.NCCL_FLOAT32
        send, receive, *_ = places = [row.data_ptr() for row in self._space]
        both, end = (send, receive, 256, kind), (self._stream,)

        def coalesced() -> None:
            self._nccl.groupStart()
            for place in places[:_TENSORS]:
                self._comm.allReduce(place, place, 256, kind, _AVERAGE, *end)
            self._nccl.groupEnd()

        calls: dict[str, Call] = {
            "all_reduce": partial(self._comm.allReduce, send, send, 256, kind, _AVERAGE, *end),
            "all_gather": partial(self._comm.allGather, *both, *end),
            "reduce_scatter": partial(self._comm.reduceScatter, *both, _AVERAGE, *end),
            _COALESCED: coalesced,
            _BUCKET: coalesced,
        }
        return calls.get(name.removesuffix(", async"))

    def close(self) -> None:
        """Destroys the communicator."""
        self._comm.destroy()


def _unrecorded(rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the times of "nccl" without torch's flight recorder, by case, from another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        flags = ["--rounds", str(rounds), "--only-nccl", "--json", str(path)]
        command = [sys.executable, "-m", "fastcoll.bench.engine", *flags]
        environment = {**os.environ, **_NO_RECORDER}
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        if status:
            print(f"# {_UNRECORDED}: not measured, exit status {status}")
            return {}
        return {row["case"]: row["time"]["nccl"] for row in read_record(path)["cases"]}


def _measure(
    makers: Mapping[str, Callable[[str], Call | None]],
    rounds: int,
    unrecorded: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Prints the table and returns its rows.

    Args:
        makers: Return the call of a case, by column.
        rounds: Batches of each.
        unrecorded: Times without torch's flight recorder, by case.
    """
    names = [*makers, *([_UNRECORDED] if unrecorded else [])]
    columns = [Column(name, max(9, len(name))) for name in (*names, "ratio")]
    table = Table(Column("microseconds of the host, medians", -45), *columns)
    print(*table.head())
    rows = []
    for case in (*CASES, _REPLAY):
        calls = {name: call for name, make in makers.items() if (call := make(case))}
        batch = max(1, _CALLS // (_TENSORS // 4)) if str(_TENSORS) in case else _CALLS
        timings = time_on_host(calls, torch.cuda.synchronize, rounds, batch)
        times = {name: asdict(one) for name, one in timings.items()}
        if case in unrecorded:
            times[_UNRECORDED] = unrecorded[case]
        medians = [times[name]["median"] if name in times else None for name in names]
        ratio = medians[0] / times["nccl"]["median"]
        print(table.row([case, *medians, ratio]), flush=True)
        rows.append({"case": case, "time": times})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        The exit status: 0, or 2 if there is no GPU or no NCCL to compare with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = script_parser("engine").parse_args(given)
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("fastcoll.bench.engine: torch finds no CUDA device, or has no NCCL", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    unrecorded = {} if options.only_nccl else _unrecorded(options.rounds)
    makers: dict[str, Callable[[str], Call | None]] = {
        name: partial(call_of, group=dist.new_group(backend=name), device=device)
        for name in ENGINE_COLUMNS[int(options.only_nccl) : 2]
    }
    if ours := makers.get("fastcoll"):
        bucket = partial(call_of, group=bucket_group(device), device=device)
        makers["fastcoll"] = lambda case: bucket(case) if case == _BUCKET else ours(case)
    bare = None if options.only_nccl else BareNccl(device, torch.cuda.current_stream().cuda_stream)
    if bare:
        makers[_BARE] = bare.call_of
    cases = _measure(makers, options.rounds, unrecorded)
    if bare:
        bare.close()
    dist.destroy_process_group()
    if options.json:
        record = describe_run(command_line("fastcoll.bench.engine", given), device)
        unit = "microseconds of the issuing thread for a call"
        write_record(options.json, {**record, "unit": unit, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
