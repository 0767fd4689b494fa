"""A mixed load for a long time: nothing may grow.

    make soak SOAK=600              or, with PYTHONPATH as the Makefile has it,
    python -m soak [--seconds 600] [--ranks 3] [--json FILE]

The exit status is 1 if something grew, or a result was wrong.
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from fault_job import Jobs, Launcher
from soak_load import sampled
from soak_verdict import THRESHOLDS, growths

from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="default 600")
    parser.add_argument("--ranks", type=int, default=3, help="default 3")
    parser.add_argument("--json", type=Path, help="write samples and verdict there")
    options = parser.parse_args(arguments)
    if options.seconds < 5 or options.ranks < 2:
        parser.error("expected at least 5 seconds and 2 ranks")
    launcher = Launcher({"FASTCOLL_TEST_BACKEND": "fastcoll"})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        jobs = Jobs(launcher, store, Path(folder))
        job = jobs(options.ranks, sampled, options.seconds)
        answers = job.hear_all(timeout=options.seconds + 60.0)
        job.ended_well()
        left = jobs.close()
    launcher.close()
    status = int(bool(left))
    for text in left:
        print(f"left behind: {text}")
    for rank, samples in answers.items():
        first, last = samples[len(samples) // 4], samples[-1]
        print(f"rank {rank}: {last.rounds} rounds in {last.at:.0f} s, {len(samples)} samples")
        for name in THRESHOLDS:
            print(
                f"  {name:12} {getattr(first, name):>12} after the warm-up, {getattr(last, name):>12} at the end"
            )
        for text in growths(samples):
            status = 1
            print(f"  GROWS: {text}")
    if options.json:
        words = sys.argv[1:] if arguments is None else arguments
        record = describe_run(words) | {
            "command": shlex.join(["python", "-m", "soak", *words]),
            "machine": describe_machine(torch.device("cpu")),
            "thresholds": THRESHOLDS,
            "grown": {rank: growths(samples) for rank, samples in answers.items()},
            "cases": [
                {"rank": rank, **dataclasses.asdict(sample)}
                for rank, samples in answers.items()
                for sample in thinned(samples)
            ],
        }
        write_record(options.json, record)
    print("nothing grows" if status == 0 else "something grows")
    return status


def thinned(samples: list) -> list:
    """Return at most 61 of the samples, the last included."""
    step = max(1, len(samples) // 60)
    return [*samples[:-1:step], samples[-1]]


if __name__ == "__main__":
    sys.exit(main())
