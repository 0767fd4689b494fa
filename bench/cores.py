"""``fastcoll bench cores``: all_reduce by ranks of 1, 2, 4, ... cores each, in one command of limited time.

Each run is ``fastcoll bench all_reduce --cores`` in processes of its own. The floor is computed with as many threads
as a rank has cores, so it is the bandwidth of memory that these cores reach together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.derived import floor_of
from fastcoll.bench.record import medians, read_record, write_record
from fastcoll.bench.sizes import size_text
from fastcoll.bench.table import Column, Table, times_text

__all__ = ["MPIEXEC", "compare_cores"]

MPIEXEC = "mpiexec.gforker"
"""The launcher of MPICH."""

# 3 calls of 1 GiB, 300 of 256 KiB
_FLAGS = ("-b", "256K", "-f", "16", "-n", "3", "--rounds", "3", "-w", "0", "--turn-ms", "50")
_RANKS = (2, 4, 8)


def _run(ranks: int, cores: int, options: argparse.Namespace) -> tuple[int, list[dict[str, Any]]]:
    """Runs the benchmark; returns its exit status, and the cases that it has measured."""
    launcher = [MPIEXEC, "-n", str(ranks)] if "mpi" in options.backends else []
    command = [*launcher, sys.executable, "-m", "fastcoll.bench", "all_reduce", *_FLAGS]
    command += ["-e", str(options.end), "--backend", ",".join(options.backends)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.jsonl")
        command += ["--nproc", str(ranks), "--cores", str(cores), "--json", str(path)]
        status = subprocess.run(command).returncode
        cases = read_record(path)["cases"] if path.exists() else []
    return status, [{"ranks": ranks, "cores_each": cores, **case} for case in cases]


def _lines(cases: list[dict[str, Any]], backends: tuple[str, ...]) -> list[str]:
    """Returns the table, with ratios to the first backend."""
    ours, *others = backends
    table = Table(
        *(Column("ranks", 5), Column("cores", 5, unit="each"), Column("size", 8)),
        *(Column(name, 12, 1, "(us)") for name in backends),
        *(Column(f"{name}/{ours}", 14) for name in others),
        *(Column("floor", 11, 1, "(us)"), Column(f"floor/{ours}", 14)),
    )
    lines = table.head()
    for case in cases:
        times, floor = medians(case), floor_of(case)
        times |= {"floor": floor["median"]} if floor else {}
        own = times.get(ours)
        ratios = [
            times_text(times[name] / own if own and name in times else None)
            for name in (*others, "floor")
        ]
        measured = [times.get(name) for name in (*backends, "floor")]
        cells = [case["ranks"], case["cores_each"], size_text(case["size"]), *measured[:-1]]
        lines.append(table.row([*cells, *ratios[:-1], measured[-1], ratios[-1]]))
    return lines


def compare_cores(options: argparse.Namespace, arguments: list[str]) -> int:
    """Runs all numbers of ranks and cores that the machine has cores for, while the time suffices.

    Args:
        options: Options of the run.
        arguments: The command line of the options, for the record.

    Returns:
        The exit status of the first run that failed, or 0.
    """
    begin, statuses = time.monotonic(), []
    pace: dict[int, float] = {}  # seconds of a run for each rank, by the cores of each
    allowed = len(os.sched_getaffinity(0))
    numbers = [1 << power for power in range(allowed.bit_length())]
    missing = [(ranks, cores) for ranks in _RANKS for cores in numbers if ranks * cores <= allowed]
    record = {
        **describe_run(command_line("fastcoll.bench", arguments)),
        "unit": "times in microseconds, sizes in bytes",
        "backends": options.backends,
        "missing": missing,
        "cases": [],
    }
    while missing:
        start, (ranks, cores) = time.monotonic(), missing[0]
        estimate = ranks * pace.get(cores, max(pace.values(), default=0))
        if start - begin + estimate > options.minutes * 60:
            break
        status, cases = _run(ranks, cores, options)
        pace[cores] = (time.monotonic() - start) / ranks
        del missing[0]
        statuses.append(status)
        record["cases"] += cases
        if options.json:
            write_record(Path(options.json), record)
    print("", *_lines(record["cases"], options.backends), sep="\n")
    if missing:
        left = ", ".join(f"{ranks} x {cores}" for ranks, cores in missing)
        print(f"# no time is left for (ranks x cores of each): {left}")
    return next(filter(None, statuses), 0)
