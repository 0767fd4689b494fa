"""``python -m fastcoll.bench.surroundings``: what surrounds the collectives of a training step, on one GPU at one rank.

Forward and backward are emulated. Ways to synchronise gradients take turns, and the same step without data
parallelism is taken away from each: host time of the backward pass and of what follows until all is queued, with the
device idle before and nobody waiting; device time between two events, with the host ahead; and what torch.profiler has
seen on the device, collectives apart. Beside these stand the bytes that a way moves by design, and the time that so
many bytes take in a copy on this device.

At one rank a collective has nothing to move: NCCL launches nothing for a sum in place, which is stock DDP's, and one
kernel for an average, which is fastcoll's. fastcoll hands lists of tensors to NCCL one by one there ("as at one rank");
the other rows are of a group that was made with FASTCOLL_ALGO=nccl, which has lists go through a bucket, and a wire
dtype through casts, as they do between ranks. FSDP2 of torch 2.13 calls no collective at one rank, so no plug either.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.step_clock import CudaClock, Observed, StepClock
from fastcoll.bench.step_paths import (
    STOCK,
    Groups,
    StepPath,
    blocks_of,
    local_gradient,
    step_paths,
)
from fastcoll.bench.timing import summarise
from fastcoll.bench.traffic_paths import Attached

__all__ = ["Chain", "Settings", "main", "measure_copy", "measure_model"]

_MODULE = "fastcoll.bench.surroundings"
_TARGET = 1 / 3  # of the host time that stock DDP adds
_VALUES = 97  # different gradients, all of which bfloat16 has
_BLOCK = 25 << 20  # bytes of a block that FSDP shards

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """How long is measured.

    Attributes:
        rounds: Turns of each way.
        steps: Steps of a turn, of each kind.
        warmup: Steps of a turn before: plans are made for where its gradients lie now.
        traced: Steps under the profiler.
        seconds: No round begins after that.
    """

    rounds: int = 12
    steps: int = 3
    warmup: int = 4
    traced: int = 3
    seconds: float = 120.0


class Chain(nn.Module):
    """A model in blocks, each of which FSDP can shard by itself."""

    def __init__(self, blocks: Sequence[EmulatedModel]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self) -> torch.Tensor:
        """Returns a scalar that depends on every parameter."""
        carry: torch.Tensor | None = None
        for block in self.blocks:
            carry = block(carry)
        assert carry is not None
        return carry


@dataclass
class _Candidate:
    """A way to train, ready to be timed.

    Attributes:
        path: Which.
        module: Its model.
        attached: What is called.
        expected: Of every gradient, in order.
        samples: Microseconds by kind: of the host until the backward pass returns ("backward") and until all is queued
            ("host"), and of the device.
        observed: By the profiler.
        plans: Plans that fastcoll made in timed steps: a step that makes some is slower.
    """

    path: StepPath
    module: nn.Module
    attached: Attached
    expected: Sequence[float]
    samples: dict[str, list[float]] = field(
        default_factory=lambda: {"backward": [], "host": [], "device": []}
    )
    observed: Observed | None = None
    plans: int = 0

    def prepare(self) -> torch.Tensor:
        """Drops the gradients of the step before, and returns the loss of the next."""
        self.module.zero_grad(set_to_none=not self.path.kept)
        loss: torch.Tensor = self.attached.module()
        return loss

    def step(self) -> None:
        """Takes a step."""
        self.prepare().backward()  # type: ignore[no-untyped-call]
        self.attached.after()

    def wrong(self) -> int:
        """Returns how many elements of the gradients are not what they should be."""
        count = 0
        for parameter, value in zip(self.module.parameters(), self.expected, strict=True):
            grad = local_gradient(parameter)
            count += parameter.numel() if grad is None else int((grad != value).sum())
        return count


def _values(count: int) -> list[float]:
    return [float(1 + index % _VALUES) for index in range(count)]


def _model(path: StepPath, shapes: Sequence[Shape], memory: torch.Tensor) -> nn.Module:
    values = _values(len(shapes))
    if not path.blocks:
        return EmulatedModel(shapes, memory, values, 0.0)
    parts, at, done = [], 0, 0
    for block in blocks_of(shapes, _BLOCK):
        parts.append(EmulatedModel(block, memory[done:], values[at : at + len(block)], 0.0))
        at += len(block)
        done += sum(map(math.prod, block))
    return Chain(parts)


def _plans_built() -> int:
    from fastcoll.cuda.engine import engines

    return sum(one.plans.built for engine in engines() for one in engine.all_reduces.values())


class _Measurement:
    """All ways to train one model; what fails is left out and told, and the others are measured.

    Args:
        device: Where.
        clock: Its.
        settings: How long.

    Attributes:
        candidates: By name.
        failed: By name, what went wrong.
    """

    def __init__(self, device: torch.device, clock: StepClock, settings: Settings) -> None:
        self._device = device
        self._clock = clock
        self._settings = settings
        self.candidates: dict[str, _Candidate] = {}
        self.failed: dict[str, str] = {}

    def build(self, paths: Sequence[StepPath], shapes: Sequence[Shape]) -> None:
        """Makes the models, which share their parameters' memory, and takes their first steps."""
        memory = torch.zeros(sum(map(math.prod, shapes)), device=self._device)
        for path in paths:
            with self._failing(path.name):
                module = _model(path, shapes, memory)
                attached = path.attach(module)
                made = _Candidate(path, module, attached, _values(len(shapes)))
                for _ in range(self._settings.warmup):
                    made.step()
                self._clock.synchronize()
                self.candidates[path.name] = made
        self.verify()

    def verify(self) -> None:
        """Leaves out what has wrong gradients."""
        for name, candidate in list(self.candidates.items()):
            with self._failing(name):
                candidate.step()
                self._clock.synchronize()
                if wrong := candidate.wrong():
                    raise ArithmeticError(f"{wrong} elements of the gradients are wrong")

    def observe(self) -> None:
        """Looks at some steps of each by the profiler; where that fails the times stand without."""
        for name, candidate in self.candidates.items():
            try:
                for _ in range(self._settings.warmup):
                    candidate.step()
                candidate.observed = self._clock.observe(candidate.step, self._settings.traced)
            except Exception:
                self.failed[f"{name}, profiler"] = traceback.format_exc()

    def time(self) -> None:
        """Takes turns until rounds or seconds are over."""
        stop = time.monotonic() + self._settings.seconds
        gc.collect()
        gc.freeze()
        gc.disable()  # no step is longer for it; between rounds it runs
        try:
            for turn in range(self._settings.rounds):
                if turn and time.monotonic() > stop:
                    return
                gc.collect()
                names = list(self.candidates)
                first = turn % max(len(names), 1)
                for name in names[first:] + names[:first]:
                    with self._failing(name):
                        self._turn(self.candidates[name])
        finally:
            gc.enable()
            gc.unfreeze()

    def _turn(self, candidate: _Candidate) -> None:
        for _ in range(self._settings.warmup):
            candidate.step()
        before = _plans_built()
        for _ in range(self._settings.steps):
            loss = candidate.prepare()
            self._clock.synchronize()
            begin = time.perf_counter_ns()
            loss.backward()  # type: ignore[no-untyped-call]
            middle = time.perf_counter_ns()
            candidate.attached.after()
            end = time.perf_counter_ns()
            candidate.samples["backward"].append((middle - begin) / 1e3)
            candidate.samples["host"].append((end - begin) / 1e3)
        # Half as much again as the host takes, so that the device never waits for it.
        ahead = 1.5 * max(candidate.samples["host"][-self._settings.steps :]) + 200
        for _ in range(self._settings.steps):
            loss = candidate.prepare()
            self._clock.synchronize()
            self._clock.occupy(ahead)
            start = self._clock.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            candidate.attached.after()
            candidate.samples["device"].append(self._clock.between(start, self._clock.mark()))
        candidate.plans += _plans_built() - before

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed[name] = traceback.format_exc()
            self.candidates.pop(name, None)


def _row(
    candidate: _Candidate, base: _Candidate, size: int, bytes_per_microsecond: float
) -> dict[str, Any]:
    """Returns the figures of a way to train; `size` is that of all gradients, S."""
    path = candidate.path
    times = {kind: summarise(each) for kind, each in candidate.samples.items()}
    bases = {kind: summarise(each) for kind, each in base.samples.items()}
    row: dict[str, Any] = {
        "name": path.name,
        "base": path.base,
        "passes": path.passes,
        "time": {kind: asdict(each) for kind, each in times.items()},
        "added": {kind: times[kind].median - bases[kind].median for kind in times},
        "plans_made_in_timed_steps": candidate.plans,
    }
    if path.passes is not None:
        row["bytes"] = round(path.passes * size)
        row["bytes_microseconds"] = path.passes * size / bytes_per_microsecond
    if candidate.observed is not None and base.observed is not None:
        added = candidate.observed.less(base.observed)
        row["observed"] = asdict(candidate.observed)
        row["observed_added"] = asdict(added)
        row["around_microseconds"] = added.around_microseconds
    return row


def measure_copy(device: torch.device, clock: StepClock, size: int) -> float:
    """Returns the bytes that a copy on the device reads and writes in a microsecond: the median of 20 of them."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(23):
        clock.occupy(20)
        begin = clock.mark()
        target.copy_(source)
        samples.append(clock.between(begin, clock.mark()))
    return 2 * size / summarise(samples[3:]).median


def measure_model(
    name: str,
    shapes: Sequence[Shape],
    groups: Groups,
    device: torch.device,
    clock: StepClock,
    settings: Settings,
    bytes_per_microsecond: float,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures all ways to train one model.

    Args:
        name: Of the model.
        shapes: Of its parameters, float32.
        groups: Of this rank.
        device: Where.
        clock: Its.
        settings: How long.
        bytes_per_microsecond: Of a copy.
        only: Parts of names; none: all ways.

    Returns:
        What the record has of it.
    """
    from fastcoll.bench.kernel_cases import bucketed

    measured = _Measurement(device, clock, settings)
    paths = step_paths(groups, device, shapes, bucketed(shapes))
    bases = {path.base for path in paths}
    wanted = [
        path
        for path in paths
        if not only or path.name in bases or any(part in path.name for part in only)
    ]
    measured.build(wanted, shapes)
    measured.time()
    measured.observe()
    measured.verify()
    size = 4 * sum(map(math.prod, shapes))
    rows = []
    for path in wanted:
        candidate, base = (measured.candidates.get(key) for key in (path.name, path.base))
        if candidate is not None and base is not None and candidate.samples["host"]:
            rows.append(_row(candidate, base, size, bytes_per_microsecond))
    _compare(rows)
    return {
        "model": name,
        "tensors": len(shapes),
        "size": size,
        "rounds": max((row["time"]["host"]["count"] for row in rows), default=0) // settings.steps,
        "paths": rows,
        "failed": measured.failed,
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row what it adds over what stock DDP adds, where that is above the noise."""
    stock = next((row for row in rows if row["name"] == STOCK), None)
    if stock is None:
        return
    most = dict(stock["added"])
    for row in rows:
        if row["name"] == row["base"]:
            continue
        for kind in ("host", "device"):
            if most[kind] > 0:
                row[f"of_stock_{kind}"] = row["added"][kind] / most[kind]
        if "of_stock_host" in row:
            row["meets_host_target"] = row["of_stock_host"] <= _TARGET


def _print(found: dict[str, Any], copy: float) -> None:
    print(
        f"\n{found['model']}: P = {found['tensors']} tensors, S = {found['size'] / 1e6:.1f} MB; a copy moves "
        f"{copy / 1e3:.0f} GB/s. Microseconds more than without data parallelism, medians"
    )
    titles = ("host", "of stock", "device", "around", "coll.", "bytes/S", "floor", "calls")
    print(f"{'':62}" + "".join(f"{title:>9}" for title in titles))
    for row in found["paths"]:
        seen = row.get("observed_added", {})
        cells = (
            row["added"]["host"],
            row.get("of_stock_host"),
            row["added"]["device"],
            row.get("around_microseconds"),
            seen.get("collective_microseconds"),
            row["passes"],
            row.get("bytes_microseconds"),
            seen.get("calls"),
        )
        if row["name"] == row["base"]:
            time_of = row["time"]
            cells = (time_of["host"]["median"], None, time_of["device"]["median"], *[None] * 5)
        digits = (1, 3, 1, 1, 1, 2, 1, 0)
        text = "".join(
            f"{'-':>9}" if cell is None else f"{cell:9.{places}f}"
            for cell, places in zip(cells, digits, strict=True)
        )
        print(f"{row['name']:62}{text}", flush=True)
    for name, reason in found["failed"].items():
        print(f"fastcoll.bench.surroundings: {name}: {reason}", file=sys.stderr)


@contextlib.contextmanager
def _groups(device: torch.device) -> Iterator[Groups]:
    """Makes this process's groups of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        before = os.environ.get("FASTCOLL_ALGO")
        try:
            made: list[Any] = []
            for backend, algorithm in (
                ("nccl", "auto"),
                ("fastcoll", "auto"),
                ("fastcoll", "nccl"),
            ):
                os.environ["FASTCOLL_ALGO"] = algorithm
                group = dist.new_group(backend=backend)
                dist.all_reduce(torch.ones(1, device=device), group=group)  # reads the variable
                made.append(group)
            yield Groups(*made)
        finally:
            if before is None:
                os.environ.pop("FASTCOLL_ALGO", None)
            else:
                os.environ["FASTCOLL_ALGO"] = before
            dist.destroy_process_group()


def _parse(given: Sequence[str]) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "models", nargs="*", default=["resnet50", "gpt2-medium"], help="(resnet50 gpt2-medium)"
    )
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="turns (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=defaults.seconds,
        help="no round of a model begins after that (%(default)s)",
    )
    parser.add_argument(
        "--only", action="append", default=[], help="a part of a row's name; may be repeated"
    )
    parser.add_argument(
        "--copy-size", type=int, default=1 << 30, help="bytes of the copy (%(default)s)"
    )
    parser.add_argument("--json", type=Path, default=None, help="write every statistic")
    options = parser.parse_args(given)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"expected models of {', '.join(MODELS)}, got {', '.join(unknown)}")
    if options.rounds < 1:
        parser.error(f"expected at least one round, got {options.rounds}")
    return options


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _measure(
    options: argparse.Namespace,
    given: list[str],
    device: torch.device,
    clock: StepClock,
    made: contextlib.AbstractContextManager[Groups],
) -> int:
    copy = measure_copy(device, clock, options.copy_size)
    settings = Settings(rounds=options.rounds, seconds=options.seconds)
    record: dict[str, Any] = {
        **describe_run(given),
        "command": " ".join(["python -m", _MODULE, *given]),
        "machine": describe_machine(device),
        "unit": "microseconds for a step; added: medians less those of the row named as base; passes: bytes over size",
        "one_rank": (__doc__ or "").split("\n\n")[2].replace("\n", " "),
        "host_target": _TARGET,
        "settings": asdict(settings),
        "copy_gigabytes_per_second": copy / 1e3,
        "models": [],
    }
    with made as groups:
        for name in options.models:
            found = measure_model(
                name, MODELS[name](), groups, device, clock, settings, copy, options.only
            )
            _print(found, copy)
            record["models"].append(found)
            gc.collect()
            torch.cuda.empty_cache()
            if options.json:  # what there is, lest a later model cost it
                _write(options.json, record)
    return 1 if any(found["failed"] for found in record["models"]) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        The exit status: 0, 1 if something failed or was wrong, 2 if there is no GPU or no NCCL to compare with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print(f"{_MODULE}: torch finds no CUDA device, or has no NCCL", file=sys.stderr)
        return 2
    faulthandler.register(signal.SIGTERM, chain=True)  # where it was when somebody's time was up
    device = torch.device("cuda", torch.cuda.current_device())
    return _measure(options, given, device, CudaClock(), _groups(device))


if __name__ == "__main__":
    sys.exit(main())
