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
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from fastcoll.bench.gradients import MODELS
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record
from fastcoll.bench.step_clock import CudaClock, StepClock
from fastcoll.bench.step_measurement import Measurement, Settings, Shape, measure_copy
from fastcoll.bench.step_paths import Groups, step_paths
from fastcoll.bench.surroundings_report import HOST_TARGET, add_ratios, print_table, row_of

__all__ = ["main", "measure_model"]

_MODULE = "fastcoll.bench.surroundings"


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

    measured = Measurement(device, clock, settings)
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
            rows.append(row_of(candidate, base, size, bytes_per_microsecond))
    add_ratios(rows)
    return {
        "model": name,
        "tensors": len(shapes),
        "size": size,
        "rounds": max((row["time"]["host"]["count"] for row in rows), default=0) // settings.steps,
        "paths": rows,
        "failed": measured.failed,
    }


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
        **describe_run(given, _MODULE),
        "machine": describe_machine(device),
        "unit": "microseconds for a step; added: medians less those of the row named as base; passes: bytes over size",
        "one_rank": (__doc__ or "").split("\n\n")[2].replace("\n", " "),
        "host_target": HOST_TARGET,
        "settings": asdict(settings),
        "copy_gigabytes_per_second": copy / 1e3,
        "cases": [],
    }
    with made as groups:
        for name in options.models:
            found = measure_model(
                name, MODELS[name](), groups, device, clock, settings, copy, options.only
            )
            print_table(found, copy)
            record["cases"].append(found)
            gc.collect()
            torch.cuda.empty_cache()
            if options.json:  # what there is, lest a later model cost it
                write_record(options.json, record)
    return 1 if any(found["failed"] for found in record["cases"]) else 0


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
