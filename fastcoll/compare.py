"""``fastcoll compare -- COMMAND``: a job as it is and on fastcoll, in turns; compares losses, times and errors.

    fastcoll compare -- torchrun --nproc-per-node 2 train.py

Nothing in the job changes: on fastcoll it runs with ``FASTCOLL_REPLACE=gloo`` and ``FASTCOLL_DEFAULT=1``. Losses are
the numbers that the job prints behind the word "loss"; ``--pattern`` reads others. The exit status is 0 if both ways
end well with the same losses, 1 if they do not, 2 if the runs can not be compared.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastcoll._checks import QUIET_PERCENT, used_by_cores

__all__ = ["Outcome", "main"]

_LOSS = r"(?<![A-Za-z])loss[\"']?\s*[:=]?\s*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_SERVED = re.compile(r"\[fastcoll\] group '")
_ERROR = re.compile(r"^(?:\[rank\d+\]:)?\s*([\w.]*(?:Error|Exception)\b.*)")
_OURS = ("FASTCOLL_REPLACE", "FASTCOLL_DEFAULT")
_CLOSE = 1e-3  # relative difference of losses that another order of sums may explain
_LAST_LINES = 12


@dataclass
class Outcome:
    """What a run of the job printed, and when.

    Attributes:
        status: Exit status; negative: the signal that ended it.
        seconds: Of the whole run.
        losses: In the order of printing.
        between: Seconds between two losses.
        served: Whether fastcoll served a group.
        errors: Lines that name an exception.
        log: The file with all that it printed.
    """

    status: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    served: bool = False
    errors: list[str] = field(default_factory=list)
    log: Path = Path()


def _run(
    command: Sequence[str], ours: dict[str, str], pattern: re.Pattern[str], log: Path
) -> Outcome:
    """Runs the job once, with these variables instead of the user's own ones for fastcoll."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment = {"PYTHONUNBUFFERED": "1", **inherited, "FASTCOLL_DEBUG": "INFO", **ours}
    outcome, start, last = Outcome(log=log), time.monotonic(), math.nan
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as job,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            now = time.monotonic()
            file.write(line)
            outcome.served |= bool(_SERVED.search(line))
            if error := _ERROR.match(line):
                outcome.errors.append(error[1].strip())
            if found := pattern.findall(line):
                outcome.losses += map(float, found)
                if not math.isnan(last):
                    outcome.between.append((now - last) / len(found))
                last = now
    outcome.status, outcome.seconds = job.returncode, time.monotonic() - start
    return outcome


def _used() -> tuple[float, float, float]:
    """Returns the CPU seconds of ended child processes, the busy seconds of all cores, and all seconds of all cores."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime, *used_by_cores()


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:<18}" + "".join(f"{cell:>16}" for cell in cells)


def _median(values: Sequence[float], scale: float = 1.0) -> float | None:
    return statistics.median(values) * scale if values else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _difference(theirs: Sequence[float], ours: Sequence[float]) -> tuple[str, bool]:
    """Returns how the losses of two runs compare, and whether that is well."""
    if not theirs and not ours:
        return "no losses were printed: name their pattern with --pattern", True
    if len(theirs) != len(ours):
        return f"{len(theirs)} and {len(ours)} losses were printed", False
    pairs = list(zip(theirs, ours, strict=True))
    apart = [at for at, (a, b) in enumerate(pairs) if not (a == b or (a != a and b != b))]
    if not apart:
        return f"all {len(pairs)} losses are equal, as printed", True
    gap = max(abs(a - b) / max(abs(a), abs(b)) for a, b in (pairs[at] for at in apart))
    well = gap <= _CLOSE
    return f"{len(apart)} of {len(pairs)} losses differ, by {gap:.2g} of their size at most", well


def _report(
    name: str, runs: dict[str, list[Outcome]], others_percent: float
) -> tuple[list[str], int]:
    """Returns the lines of the table and the verdict, and the exit status."""
    sides = [runs[name], runs["fastcoll"]]
    firsts = [side[0] for side in sides]
    steps = [_median([one for run in side for one in run.between], 1e3) for side in sides]
    whole = [_median([run.seconds for run in side]) for side in sides]
    errors = [sum(len(run.errors) for run in side) for side in sides]
    lines = [
        _row("", (name, "fastcoll")),
        _row("exit status", [", ".join(str(run.status) for run in side) for side in sides]),
        _row("losses printed", [str(len(first.losses)) for first in firsts]),
        _row("between two, ms", [_number(step, 2) for step in steps]),
        _row("whole run, s", [_number(each, 1) for each in whole]),
        _row("errors printed", [str(each) for each in errors]),
        "",
    ]
    for title, side in zip((name, "fastcoll"), sides, strict=True):
        lines += [f"{title}: {error}" for error in dict.fromkeys(side[0].errors)][:3]
    said, same = _difference(*(first.losses for first in firsts))
    well = [all(run.status == 0 for run in side) for side in sides]
    lines.append(f"{said[0].upper()}{said[1:]}.")
    if not well[1]:
        known = "as it did without it" if not well[0] else f"and on {name} it did not"
        lines.append(f"The job failed on fastcoll, {known}: {firsts[1].log}")
    lines.append(_faster(name, steps, whole, others_percent))
    return lines, 0 if same and well == [True, True] else 1


def _faster(
    name: str, steps: list[float | None], whole: list[float | None], others_percent: float
) -> str:
    theirs, ours = steps if None not in steps else whole
    if theirs is None or ours is None:
        return "There are no times to compare."
    what = "The time between two losses" if None not in steps else "The whole run"
    busy = f"Other processes used {others_percent:.0f}% of the machine"
    if others_percent > QUIET_PERCENT:
        return f"{busy}, so the times decide nothing. Run it again when it is idle."
    word = f"{theirs / ours:.2f} times as short" if ours < theirs else "not shorter"
    return f"{busy}. {what} is {word} on fastcoll as on {name}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job, and prints the comparison.

    Args:
        arguments: Arguments of the command line. None: those of the process.

    Returns:
        The exit status: 0, 1 if losses differ or a run failed, 2 if the runs can not be compared.
    """
    parser = argparse.ArgumentParser(
        prog="fastcoll compare",
        description="Runs a job as it is and on fastcoll, in turns, and compares losses, times and errors.",
        epilog="example: fastcoll compare -- torchrun --nproc-per-node 2 train.py",
    )
    add = parser.add_argument
    add("--replace", choices=("gloo", "nccl"), default="gloo", help="the backend of the job (gloo)")
    add("--rounds", type=int, default=2, help="runs on each backend (%(default)s)")
    add("--pattern", default=_LOSS, help="regular expression of a loss, whose group is the number")
    add("command", nargs="+", help="the job, behind --")
    options = parser.parse_args(arguments)
    try:
        pattern = re.compile(options.pattern, re.IGNORECASE)
    except re.error as error:
        parser.error(f"--pattern: {error}")
    if pattern.groups != 1 or options.rounds < 1:
        parser.error("expected a --pattern with one group, and a round at least")
    name: str = options.replace
    ours = {"FASTCOLL_REPLACE": name, "FASTCOLL_DEFAULT": "1" if name == "gloo" else "cpu,cuda"}
    runs: dict[str, list[Outcome]] = {name: [], "fastcoll": []}
    folder = Path(tempfile.mkdtemp(prefix="fastcoll-compare-"))
    before = _used()
    for number in range(options.rounds):
        for side in (name, "fastcoll") if number % 2 == 0 else ("fastcoll", name):
            print(
                f"run {number + 1} of {options.rounds} on {side} ...", file=sys.stderr, flush=True
            )
            given = ours if side == "fastcoll" else {}
            try:
                outcome = _run(options.command, given, pattern, folder / f"{side}_{number + 1}.log")
            except OSError as error:
                print(f"fastcoll compare: {options.command[0]}: {error.strerror}", file=sys.stderr)
                return 2
            runs[side].append(outcome)
            if outcome.status:
                last = outcome.log.read_text().splitlines()[-_LAST_LINES:]
                print(f"it ended with {outcome.status}:", *last, sep="\n  ", file=sys.stderr)
            if outcome.served != (side == "fastcoll"):
                why = f"fastcoll served no group: the job made none of {name} or of no name."
                if outcome.served:
                    why = f"The job names fastcoll itself. Name {name} in it, and compare again."
                print(why, f"All that it printed: {outcome.log}", sep="\n")
                return 2
    ours_used, busy, whole = (now - then for now, then in zip(_used(), before, strict=True))
    others = max(0.0, 100 * (busy - ours_used) / whole) if whole > 0 else 0.0
    lines, status = _report(name, runs, others)
    print(*lines, f"All that the runs printed: {folder}", sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
