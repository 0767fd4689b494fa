"""Plays the fault matrix with any backend and prints what came of each row.

    make faults FAULTS="--backend fastcoll,gloo --rows 1-11,23 --rounds 200 --json FILE"

Ranks are processes of their own, with a limit of time, so a backend that hangs or crashes costs only
its row. The exit status is 1 if a row of fastcoll's is not as wanted.
"""

import argparse
import contextlib
import os
import re
import shlex
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_job import Jobs, Launcher
from matrix_row import ROWS, Outcome, Row, Stage, Verdict, rows
from rich.console import Console
from rich.table import Table

from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.record import write_record

__all__ = ["main", "numbers"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def load() -> None:
    """Import the modules that define the rows."""
    for path in sorted(HERE.glob("rows_*.py")):
        __import__(path.stem)


load()


def numbers(text: str) -> list[int]:
    """Read "1-11,23": the numbers of rows."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected rows as 1-11,23, got {part!r}") from None
    unknown = set(found) - {row.number for row in ROWS}
    if unknown:
        raise argparse.ArgumentTypeError(f"there are no rows {sorted(unknown)}")
    return found


def play(
    row: Row, backend: str, launcher: Launcher, store: dist.TCPStore, **named: Any
) -> dict[str, Any]:
    """Play one row with one backend; return what came of it, as JSON has it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        jobs = Jobs(launcher, store, Path(folder))
        try:
            outcome, took = row.run(Stage(jobs, backend, deep=True, **named))
            jobs.settle(6.0)
        finally:  # Ctrl-C leaves nothing behind either
            left = jobs.close()
        hung = outcome.verdict in (Verdict.HANG, Verdict.CRASH, Verdict.FAILS, Verdict.WRONG_RESULT)
        if left and not hung:
            outcome = Outcome(Verdict.LEFTOVERS, outcome.seconds, "; ".join(left))
    return {
        "verdict": str(outcome.verdict),
        "seconds": None if outcome.seconds is None else round(outcome.seconds, 4),
        "detail": impersonal(outcome.detail)[:600],
        "took": round(took, 2),
    }


def impersonal(text: str) -> str:
    """Return the text without what is of this machine: its name, and where things lie on it."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "h1", text)
    text = text.replace(str(ROOT), ".")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*?/", "", text)


def shown(found: dict[str, Any] | None) -> str:
    """Return a cell of the table."""
    if found is None:
        return ""
    color = {"as wanted": "green", "not played": "dim"}.get(found["verdict"], "red")
    seconds = "" if found["seconds"] is None else f" {found['seconds']:.3g} s"
    return f"[{color}]{found['verdict']}[/]{seconds}"


def table(results: list[dict[str, Any]], backends: list[str]) -> Table:
    """Return the matrix as a table."""
    made = Table(title="fault matrix", show_lines=False)
    for column in ("row", "fault", "wanted", *backends):
        made.add_column(column, overflow="fold")
    for found in results:
        cells = [shown(found["backends"].get(backend)) for backend in backends]
        made.add_row(str(found["row"]), found["fault"], found["wanted"], *cells)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Play, print, write; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="fastcoll,gloo", help="names, with commas between")
    parser.add_argument("--rows", type=numbers, default=None, help="as 1-11,23; default all")
    parser.add_argument("--rounds", type=int, default=10, help="of rows that repeat (row 4)")
    parser.add_argument("--hosts", type=int, default=1, help="pretended, for the ranks of each row")
    parser.add_argument("--builds", action="store_true", help="play rows that compile too")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    os.environ["FASTCOLL_TEST_SLACK"] = "1"  # here promises are measured, by the ranks too
    backends = options.backend.split(",")
    console = Console()
    results = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        launchers = {}
        for backend in backends:
            spread = {"FASTCOLL_TEST_HOSTS": str(options.hosts)} if options.hosts > 1 else {}
            launchers[backend] = Launcher({"FASTCOLL_TEST_BACKEND": backend, **spread})
            stack.callback(launchers[backend].close)
        for row in rows(options.rows):
            found: dict[str, Any] = {"row": row.number, "fault": row.fault, "wanted": row.wanted}
            found["tests"] = list(row.tests)
            found["backends"] = {
                backend: play(
                    row,
                    backend,
                    launchers[backend],
                    store,
                    rounds=options.rounds,
                    builds=options.builds,
                    hosts=options.hosts,
                )
                for backend in backends
            }
            results.append(found)
            said = ", ".join(f"{b} {shown(f)}" for b, f in found["backends"].items())
            console.print(f"{row.number:3} {row.fault}: {said}")
            for outcome in found["backends"].values():
                if outcome["verdict"] not in ("as wanted", "not played"):
                    console.print(f"      {outcome['detail'][:300]}", style="dim", markup=False)
    wide = Console(width=max(console.width, 150))
    wide.print(table(results, backends))
    for backend in backends:
        verdicts = [found["backends"][backend]["verdict"] for found in results]
        counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
        wide.print(f"{backend}: " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    if options.json:
        words = sys.argv[1:] if arguments is None else arguments
        record = describe_run(words) | {
            "command": f"make faults FAULTS={shlex.quote(shlex.join(words))}",
            "machine": describe_machine(torch.device("cpu")),
            "cases": results,
        }
        write_record(options.json, record)
    mine = [found["backends"].get("fastcoll") for found in results]
    return int(any(f and f["verdict"] not in ("as wanted", "not played") for f in mine))


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(status)
