"""``python -m fastcoll.bench.startup``: how long a command takes to start, in turns.

``python`` starts and ends. ``import torch`` is without and with the entry point by which torch finds fastcoll.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from fastcoll._measure import in_turns, summarise
from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.options import script_parser
from fastcoll.bench.record import write_record
from fastcoll.bench.table import Column, Table

__all__ = ["CASES", "main"]

CASES = {
    "python": (("-c", "pass"), "1"),
    "fastcoll --help": (("-m", "fastcoll", "--help"), "1"),
    "import torch": (("-c", "import torch"), "0"),
    "import torch, with fastcoll": (("-c", "import torch"), "1"),
}
"""The arguments of Python, and TORCH_DEVICE_BACKEND_AUTOLOAD."""

_TABLE = Table(
    *(Column("command", -28), Column("median(ms)", 11, 1), Column("q1", 8, 1), Column("q3", 8, 1))
)


def _run(arguments: Sequence[str], autoload: str) -> list[float]:
    begin = time.perf_counter_ns()
    subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return [(time.perf_counter_ns() - begin) / 1e3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = script_parser("startup").parse_args(given)
    turns = {name: partial(_run, *case) for name, case in CASES.items()}
    in_turns(turns, 1)  # compiles Python's modules
    times = {name: summarise(each) for name, each in in_turns(turns, options.rounds).items()}
    print(*_TABLE.head(), sep="\n")
    for name, one in times.items():
        print(_TABLE.row([name, *(each / 1e3 for each in (one.median, one.lower, one.upper))]))
    if options.json:
        record = describe_run(command_line("fastcoll.bench.startup", given))
        cases = [{"command": name, "time": asdict(each)} for name, each in times.items()]
        write_record(options.json, {**record, "unit": "microseconds", "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
