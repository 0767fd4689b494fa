"""``python -m fastcoll.bench.kernels``: the kernels on one GPU beside stock DDP's launches for the same work.

Kernels between ranks run on a stream for each rank, and are compared with the traffic of their formulas.

Bandwidth is the least number of bytes that the work must read and write, over a median time. The time is that of a
captured graph (device only) or of calls (eager, as in a training step). The bandwidth of a copy on the device in the
same run is beside it: of the same buckets for flatten, else of 1 GiB. Candidates take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from fastcoll._measure import Call
from fastcoll.bench import kernel_cases, peer_cases
from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.derived import BAR, copy_bandwidth
from fastcoll.bench.device_timing import time_on_device, time_on_host
from fastcoll.bench.gradients import MODELS
from fastcoll.bench.kernel_cases import Case, Shape
from fastcoll.bench.options import script_parser
from fastcoll.bench.record import write_record
from fastcoll.bench.table import Column, Table
from fastcoll.buckets import BucketLayout
from fastcoll.kernels.flatten import Flatten

__all__ = ["main"]

_SMALL: list[Shape] = [(7, 3), (4096,), (5,), (70, 70)]  # for --check
_TABLE = Table(
    *(Column("case", -44), Column("candidate", -10), Column("graph us", 9, 1)),
    *(Column("eager us", 9, 1), Column("GB/s", 6, 0), Column("of copy", 7), Column("x ours", 6)),
)

Maker = Callable[[], Case]
Row = dict[str, Any]


def _cases(device: torch.device, small: bool) -> Iterator[Maker]:
    """Yields makers of cases, the most important first; makers, because only one case may hold memory at a time."""
    names = ("resnet50", "gpt2-medium")
    models = {"small": _SMALL} if small else {name: MODELS[name]() for name in names}
    buckets = {name: kernel_cases.bucketed(shapes) for name, shapes in models.items()}
    elements = 9000 if small else 1 << 25
    yield partial(kernel_cases.copy_case, 1 << 16 if small else 1 << 30, device)
    for model in buckets.items():
        yield partial(kernel_cases.flatten_case, *model, device)
        yield partial(kernel_cases.flatten_case, *model, device, back=True)
        yield partial(kernel_cases.hook_case, *model, device)
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(kernel_cases.reduce_case, 8, elements, dtype, device)
    yield from peer_cases.all_reduce_cases(device, small)


def _host(device: torch.device, stream: torch.cuda.Stream) -> dict[str, float]:
    """Returns the host time of launches in microseconds."""
    layout = BucketLayout([1024] * 32)
    tensors = [torch.zeros(1024, device=device) for _ in range(32)]
    bucket = layout.new_bucket(torch.float32, device)
    plan = Flatten(layout, torch.float32, torch.float32, device)
    one, other = torch.zeros(1024, device=device), torch.zeros(1024, device=device)
    works: dict[str, Call] = {"prepared launch of flatten": plan.prepare(tensors, bucket)}
    for name, launch in peer_cases.prepared_launches(one, other):
        works[f"prepared launch of {name}"] = launch
    works["prepare and launch flatten of 32 tensors"] = lambda: plan.prepare(tensors, bucket)()
    works["torch.mul(out=)"] = lambda: torch.mul(one, 0.5, out=other)
    times = time_on_host(works, stream.synchronize, rounds=50, batch=100)
    return {name: time.median for name, time in times.items()}


def _copy(rows: Mapping[str, Row], row: Row | None = None) -> float:
    """Returns the bandwidth of the bar of a row: its own, or the large copy, which is measured first."""
    if own := row and copy_bandwidth(row, BAR):
        return own
    first: Row = next(iter(rows.values()), {"candidates": {}})
    bandwidth = copy_bandwidth(first, "copy")
    if bandwidth is None:
        raise RuntimeError("expected the copy to be measured first, and it failed")
    return bandwidth


def _clocks() -> str | None:
    query = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _print(record: dict[str, Any], rows: Mapping[str, Row]) -> None:
    print(*_TABLE.head())
    for row in rows.values():
        ours = row["candidates"].get("fastcoll")
        for name, times in row["candidates"].items():
            graph, eager = (float(times[way]["median"]) for way in ("graph", "eager"))
            bandwidth = float(row["bytes"]) / graph / 1e3  # GB/s
            more = [
                bandwidth,
                bandwidth / _copy(rows, row),
                eager / (ours["eager"]["median"] if ours else eager),
            ]
            print(_TABLE.row([row["name"], name, graph, eager, *more]))
    for name, value in record["host_microseconds"].items():
        print(f"host: {name}: {value:.2f} us")
    if not record["complete"]:
        print("# not measured: cases after the last row")


def _verify(device: torch.device) -> int:
    wrong = 0
    for make in _cases(device, small=True):
        case = make()
        for candidate in case.works:
            if not case.verify(candidate):
                wrong += 1
                print(f"fastcoll.bench.kernels: {case.name}: {candidate} is wrong")
    print(f"# wrong candidates: {wrong} {'FAILED' if wrong else 'OK'}")
    return 1 if wrong else 0


def _measure_case(
    case: Case, stream: torch.cuda.Stream, rounds: int, rows: Mapping[str, Row]
) -> Row:
    wrong = [candidate for candidate in case.works if not case.verify(candidate)]
    if wrong:
        raise ValueError(f"wrong: {', '.join(wrong)}")
    if "copy" not in case.works:
        _copy(rows)  # raises if there is no copy to compare with
    timings = time_on_device(case.works, stream, rounds)
    case.check()
    candidates = {
        name: {way: asdict(times) for way, times in ways.items()} for name, ways in timings.items()
    }
    given = {"name": case.name, "bytes": case.bytes, "launches": case.launches}
    return {**given, "candidates": candidates}


def _measure(options: argparse.Namespace, given: list[str], device: torch.device) -> int:
    """Measures and records all cases, even if some fail."""
    stop = time.monotonic() + options.seconds
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    rows: dict[str, Row] = {}
    failed: dict[str, str] = {}
    record: dict[str, Any] = {
        **describe_run(command_line("fastcoll.bench.kernels", given), device),
        "clocks": [_clocks()],
        "unit": "microseconds; bytes that must be read and written",
        "complete": False,
        "failed": failed,
        "host_microseconds": {},
    }

    @contextlib.contextmanager
    def failing(name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            failed[name] = traceback.format_exc()

    with torch.cuda.stream(stream):
        with failing("host times"):
            record["host_microseconds"] = _host(device, stream)
        with failing("cases"):
            for number, make in enumerate(_cases(device, small=False)):
                if time.monotonic() > stop:
                    break
                with failing(f"case {number}"):
                    case = make()
                    with failing(case.name):
                        rows[case.name] = _measure_case(case, stream, options.rounds, rows)
                    del case
                torch.cuda.empty_cache()  # raises if the device has failed
            else:
                record["complete"] = True
    record["clocks"].append(_clocks())
    if options.json:
        write_record(options.json, {**record, "cases": list(rows.values())})
    _print(record, rows)
    for name, text in failed.items():
        print(f"fastcoll.bench.kernels: {name}: {text}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or verifies.

    Returns:
        The exit status: 0, 1 if a result was wrong, 2 if nothing could be measured.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = script_parser("kernels").parse_args(given)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif options.check:
        device = torch.device("cpu")  # interpreted, or refused by the kernels
    else:
        print("fastcoll.bench.kernels: torch finds no CUDA device", file=sys.stderr)
        return 2
    return _verify(device) if options.check else _measure(options, given, device)


if __name__ == "__main__":
    sys.exit(main())
