"""Runs a step of ``make demo`` or ``make build``, and shows how far it is.

    python tools/step.py NAME COMMAND ...    runs a command of pip, which may compile with ninja
    python tools/step.py --times             prints how long each step took, since the time MAKE_STARTED

A terminal gets one bar of packages or units with the time so far; anything else gets a line for each unit. What the
command printed is shown only if it fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

TIMES = Path("build/times.jsonl")

_UNIT = re.compile(r"\s*\[(\d+)/(\d+)\] \w+ (?:.*/)?(\S+)")  # of ninja
_FOUND = re.compile(r"\s*Collecting (\S+)")
_FETCHED = re.compile(r"\s*Downloading \S*?([^/\s]+?)-\d\S* (\(.+?\))")
_INSTALLED = re.compile(r"\s*Installing collected packages: (.*)")


@dataclass(frozen=True)
class Seen:
    """What a line of a command's output shows.

    Attributes:
        text: What is being done.
        done: Units that are compiled, or packages that are found.
        total: How many there are; None if that is not known.
    """

    text: str
    done: int
    total: int | None = None


def seen(lines: Iterable[str]) -> Iterator[Seen]:
    """Yields what each line shows; most show nothing."""
    found = 0
    for line in lines:
        if unit := _UNIT.match(line):
            yield Seen(f"compiled {unit[3]}", int(unit[1]), int(unit[2]))
        elif package := _FOUND.match(line):
            found += 1
            yield Seen(f"found {package[1]}", found)
        elif package := _FETCHED.match(line):
            yield Seen(f"fetched {package[1]} {package[2]}", found)
        elif installed := _INSTALLED.match(line):
            yield Seen(f"installing {len(installed[1].split(','))} packages", found)


def run(name: str, command: list[str], console: Console) -> int:
    """Runs a command, and returns its exit status."""
    start = time.time()
    lines: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None

    def kept() -> Iterator[str]:
        for line in process.stdout or ():
            lines.append(line)
            yield line

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=None, text="")
        for each in seen(kept()):
            bar.update(task, total=each.total, completed=each.done, text=each.text)
            if not console.is_terminal and each.total is not None:
                print(f"{name} [{each.done}/{each.total}] {each.text}", flush=True)
    status = process.wait()
    seconds = time.time() - start
    if status != 0:
        print("".join(lines), end="", flush=True)
        return status
    print(f"{name}: {seconds:.0f} s", flush=True)
    TIMES.parent.mkdir(exist_ok=True)
    with TIMES.open("a") as file:
        print(json.dumps({"step": name, "start": start, "seconds": seconds}), file=file)
    return 0


def times(since: float) -> str:
    """Returns how long the steps took that started since then, and the rest of the time."""
    rows = [json.loads(line) for line in TIMES.read_text().splitlines()] if TIMES.exists() else []
    rows = [row for row in rows if row["start"] >= since]
    total = time.time() - since
    rest = total - sum(row["seconds"] for row in rows)
    parts = [f"{row['step']} {row['seconds']:.0f} s" for row in rows]
    return f"{', '.join([*parts, f'the rest {rest:.0f} s'])}; together {total:.0f} s"


if __name__ == "__main__":
    if sys.argv[1:] == ["--times"]:
        print(times(float(os.environ["MAKE_STARTED"])))
    else:
        sys.exit(run(sys.argv[1], sys.argv[2:], Console()))
