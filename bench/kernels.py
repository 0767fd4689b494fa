"""``python -m fastcoll.bench.kernels``: the kernels on one GPU against what stock DDP launches for the same work.

Those between ranks play all ranks in one launch, against the traffic that their formulas ask for.

Bandwidth is the least number of bytes that the work must read and write, over the median time of a captured
graph (device only) or of calls (eager, as a training step makes them), beside the bandwidth of a copy on
the device in the same run. Candidates take turns; every call takes another set of buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fastcoll.bench.device_timing import DeviceTiming, host_microseconds, time_on_device
from fastcoll.bench.gradients import MODELS
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record

__all__ = ["main", "targets"]

_SMALL = [(7, 3), (4096,), (5,), (70, 70)]  # for --check
_MESSAGES = (torch.float32, torch.bfloat16)
_PREPARED = "prepared launch of "  # name of a host time that is a target
_SWEEP = [(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8)]


def _cases(device: torch.device, small: bool, sweep: bool) -> Iterator[Callable[[], Any]]:
    """Yields what makes each case, the most important ones first: so that only one holds memory at a time."""
    from fastcoll.bench import peer_cases

    models = (
        {"small": _SMALL}
        if small
        else {name: MODELS[name]() for name in ("resnet50", "gpt2-medium")}
    )
    elements, sets = (9000, 1) if small else (1 << 25, 2)
    yield from _local_cases(models, elements, sets, device)
    yield from peer_cases.all_reduce_cases(device, small)
    if sweep:
        yield from _swept_cases(models, elements, sets, device)
        if not small:
            yield from peer_cases.swept_cases(device)


def _local_cases(
    models: dict[str, list[tuple[int, ...]]], elements: int, sets: int, device: torch.device
) -> Iterator[Callable[[], Any]]:
    from fastcoll.bench import kernel_cases as cases

    yield partial(cases.copy_case, (1 << 16) if sets == 1 else (1 << 30), sets, device)
    for name, shapes in models.items():
        buckets = cases.bucketed(shapes)
        rotation = 1 if sets == 1 else (4 if name == "resnet50" else 2)
        yield partial(cases.flatten_case, name, buckets, rotation, device)
        yield partial(cases.flatten_case, name, buckets, rotation, device, back=True)
        yield partial(cases.hook_case, name, buckets, rotation, device)
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(cases.reduce_case, 8, elements, dtype, sets, device)


def _swept_cases(
    models: dict[str, list[tuple[int, ...]]], elements: int, sets: int, device: torch.device
) -> Iterator[Callable[[], Any]]:
    from fastcoll.bench import kernel_cases as cases
    from fastcoll.kernels._plan import Blocking

    def with_blocking(make: Callable[..., Any], *arguments: Any, blocking: Blocking) -> Any:
        case = make(*arguments, blocking)
        case.name += f" block {blocking.block} warps {blocking.warps}"
        return case

    for block, warps in _SWEEP:
        make = partial(with_blocking, blocking=Blocking(block, warps))
        for name, shapes in models.items():
            yield partial(make, cases.flatten_case, name, cases.bucketed(shapes), sets, device)
        yield partial(make, cases.reduce_case, 8, elements, torch.float32, sets, device)


def _row(case: Any, timings: dict[str, DeviceTiming], copy: float | None) -> dict[str, Any]:
    """Returns a case's times; `copy` is the bandwidth of the floor in GB/s."""
    candidates = {}
    ours = timings.get("fastcoll")
    for name, timing in timings.items():
        assert timing.graph is not None
        bandwidth = case.bytes / timing.graph.median / 1e3
        candidates[name] = {
            "eager": asdict(timing.eager),
            "graph": asdict(timing.graph),
            "gigabytes_per_second": bandwidth,
            "of_copy": bandwidth / copy if copy else 1.0,
        }
        if ours is not None and ours.graph is not None:
            candidates[name]["times_fastcoll_eager"] = timing.eager.median / ours.eager.median
            candidates[name]["times_fastcoll_graph"] = timing.graph.median / ours.graph.median
    return {
        "name": case.name,
        "bytes": case.bytes,
        "launches": case.launches,
        "candidates": candidates,
    }


def _host(device: torch.device, stream: torch.cuda.Stream) -> dict[str, float]:
    """Returns the host time of launches in microseconds."""
    from fastcoll.bench import peer_cases
    from fastcoll.buckets import BucketLayout
    from fastcoll.kernels import Flatten

    layout = BucketLayout([1024] * 32)
    tensors = [torch.zeros(1024, device=device) for _ in range(32)]
    bucket = layout.new_bucket(torch.float32, device)
    plan = Flatten(layout, torch.float32, torch.float32, device)
    one, other = torch.zeros(1024, device=device), torch.zeros(1024, device=device)
    works: dict[str, Callable[[], object]] = {
        f"{_PREPARED}flatten": plan.prepare(tensors, bucket),
        **{
            f"{_PREPARED}{name}": launch
            for name, launch in peer_cases.prepared_launches(one, other)
        },
        "prepare and launch flatten of 32 tensors": lambda: plan(tensors, bucket),
        "torch.mul(out=)": lambda: torch.mul(one, 0.5, out=other),
    }
    return {name: host_microseconds(work, stream) for name, work in works.items()}


def targets(rows: dict[str, dict[str, Any]], host: dict[str, float]) -> list[dict[str, Any]]:
    """Returns what was to be reached beside what was: name, limit, value, whether it is met.

    What was not measured, as time was up before or it failed, is left out.
    """
    from fastcoll.bench import peer_cases

    found: list[dict[str, Any]] = []

    def at_least(case: str, name: str, limit: float, candidate: str, what: str) -> None:
        if case in rows:
            value = float(rows[case]["candidates"][candidate][what])
            name = f"{case}: {name}"
            found.append({"name": name, "at_least": limit, "value": value, "met": value >= limit})

    def share_of_copy(case: str, limit: float) -> None:
        at_least(case, "share of copy bandwidth", limit, "fastcoll", "of_copy")

    for model, share, hook in (("resnet50", 0.75, 6.0), ("gpt2-medium", 0.9, 2.2)):
        for way in ("flatten", "unflatten"):
            case = f"{way} {model}"
            share_of_copy(case, share)
            at_least(case, "times faster than DDP", 3.0, "ddp", "times_fastcoll_eager")
            at_least(case, "times faster than foreach", 1.3, "foreach", "times_fastcoll_graph")
        at_least(f"flatten {model}", "times faster than cat", 1.3, "cat", "times_fastcoll_graph")
        case = f"bf16 hook {model}"
        at_least(case, "times faster than stock", hook, "stock", "times_fastcoll_eager")
    for dtype in ("float32", "bfloat16"):
        share_of_copy(f"reduce 8 x {dtype}", 0.9)
    for algorithm, ranks, message in product(peer_cases.TARGETS, peer_cases.RANKS, _MESSAGES):
        share_of_copy(peer_cases.case_name(algorithm, ranks, peer_cases.LARGE, message), 0.8)
    for name, value in host.items():
        if name.startswith(_PREPARED):
            text = f"host microseconds of a {name}"
            found.append({"name": text, "at_most": 3.0, "value": value, "met": value <= 3.0})
    return found


def _clocks() -> str | None:
    query = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _print(
    rows: dict[str, dict[str, Any]], host: dict[str, float], reached: list[dict[str, Any]]
) -> None:
    print(
        f"{'case':44} {'candidate':10} {'graph us':>9} {'eager us':>9} {'GB/s':>6} {'of copy':>7} {'x ours':>6}"
    )
    for row in rows.values():
        for name, found in row["candidates"].items():
            ratio = found.get("times_fastcoll_eager", 1.0)
            print(
                f"{row['name']:44} {name:10} {found['graph']['median']:9.1f} {found['eager']['median']:9.1f} "
                f"{found['gigabytes_per_second']:6.0f} {found['of_copy']:7.2f} {ratio:6.2f}"
            )
    for name, value in host.items():
        print(f"host: {name}: {value:.2f} us")
    for target in reached:
        limit = target.get("at_least", target.get("at_most"))
        word = "at least" if "at_least" in target else "at most"
        print(
            f"{'met   ' if target['met'] else 'MISSED'} {target['name']}: {target['value']:.2f}, {word} {limit}"
        )


def _verify(device: torch.device) -> int:
    wrong = 0
    for make in _cases(device, small=True, sweep=True):
        case = make()
        for candidate, verify in case.verify.items():
            if not verify():
                wrong += 1
                print(f"fastcoll.bench.kernels: {case.name}: {candidate} is wrong")
    print(f"# wrong candidates: {wrong} {'FAILED' if wrong else 'OK'}")
    return 1 if wrong else 0


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed calls (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="other block sizes and warps too")
    parser.add_argument(
        "--check", action="store_true", help="verify on small tensors, time nothing"
    )
    parser.add_argument(
        "--seconds", type=float, default=200, help="start no case after that (%(default)s)"
    )
    parser.add_argument("--json", type=Path, default=None, help="write every statistic")
    return parser.parse_args(given)


class _Measurement:
    """What has been measured so far; whatever fails, that is kept.

    Attributes:
        rows: By case.
        host: Host times in microseconds.
        failed: By case, what was wrong with it.
        complete: Whether no case was left out.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device = device
        self._rounds = rounds
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy: float | None = None
        self.rows: dict[str, dict[str, Any]] = {}
        self.host: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.complete = False

    def take_host_times(self) -> None:
        """Measures what launches cost the host."""
        with self._failing("host times"), torch.cuda.stream(self._stream):
            self.host = _host(self._device, self._stream)

    def take_cases(self, sweep: bool, seconds: float) -> None:
        """Measures the cases; starts none when the seconds are up."""
        stop = time.monotonic() + seconds
        with self._failing("cases"), torch.cuda.stream(self._stream):
            for number, make in enumerate(_cases(self._device, small=False, sweep=sweep)):
                if time.monotonic() > stop:
                    return
                with self._failing(f"case {number}"):
                    self._take(make())
                torch.cuda.empty_cache()  # raises if the device answers nothing more
            self.complete = True

    def _take(self, case: Any) -> None:
        with self._failing(case.name):
            wrong = [candidate for candidate, verify in case.verify.items() if not verify()]
            if wrong:
                self.failed[case.name] = f"wrong: {', '.join(wrong)}"
                return
            if self._copy is None and "copy" not in case.works:
                raise RuntimeError("expected the copy to be measured first, and it failed")
            timings = time_on_device(case.works, self._stream, self._rounds)
            case.check()
            row = self.rows[case.name] = _row(case, timings, self._copy)
            if self._copy is None:
                self._copy = row["candidates"]["copy"]["gigabytes_per_second"]

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed[name] = traceback.format_exc()


def _measure(options: argparse.Namespace, given: list[str], device: torch.device) -> int:
    clocks = [_clocks()]
    measured = _Measurement(device, options.rounds)
    measured.take_host_times()
    measured.take_cases(options.sweep, options.seconds)
    clocks.append(_clocks())
    reached = targets(measured.rows, measured.host)
    if options.json:
        record = {
            **describe_run(given, "fastcoll.bench.kernels"),
            "machine": describe_machine(device),
            "clocks": clocks,
            "unit": "microseconds; bytes and GB/s count what must be read and written",
            "complete": measured.complete,
            "failed": measured.failed,
            "cases": list(measured.rows.values()),
            "host_microseconds": measured.host,
            "targets": reached,
        }
        write_record(options.json, record)
    _print(measured.rows, measured.host, reached)
    for name, text in measured.failed.items():
        print(f"fastcoll.bench.kernels: {name}: {text}", file=sys.stderr)
    if not measured.complete:
        print("# not measured: cases after the last row")
    return 1 if measured.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or verifies.

    Returns:
        The exit status: 0, 1 if a result was wrong, 2 if nothing could be measured.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
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
