"""Checks the model of the shared-memory protocol, and that seeded errors in it are found.

    python tests/model/check_model.py [--quick]

Needs spin (Debian and Ubuntu: apt-get install spin) and a C compiler. The exit status is 1 if the
model has an error, if a mutant has none, or if a search was cut short.
"""

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = Path(__file__).with_name("segment_stream.pml")

LEAST_STATES = 10_000
"""A search of the model that sees fewer has a mistake in its macros."""

LIMIT = 600.0
"""Seconds for one search; the largest takes two minutes."""


@dataclasses.dataclass(frozen=True)
class Search:
    """One exhaustive search: a name, and the macros that make it."""

    name: str
    macros: tuple[str, ...]
    quick: bool = True


MODELS = [
    Search("two ranks", ("COLLECTIVES=4",), quick=False),
    Search("two ranks, two segments, a ring of one", ("SEGMENTS=2", "RING=1")),
    Search("two ranks, two segments, a ring of three", ("SEGMENTS=2", "RING=3"), quick=False),
    Search("two ranks that write back", ("WRITES_BACK", "SEGMENTS=2", "COLLECTIVES=2")),
    Search(
        "two ranks that write back, one dies",
        ("WRITES_BACK", "DEATH", "SEGMENTS=2", "COLLECTIVES=2"),
        quick=False,
    ),
    Search(
        "three ranks that write back, one dies",
        ("WRITES_BACK", "N=3", "COLLECTIVES=1", "DEATH"),
        quick=False,
    ),
    Search("two ranks that disagree", ("MISMATCH", "SEGMENTS=2")),
    Search("two ranks, one dies", ("DEATH", "SEGMENTS=2", "COLLECTIVES=2"), quick=False),
    Search("two ranks that disagree, one dies", ("MISMATCH", "DEATH")),
    Search("three ranks", ("N=3", "COLLECTIVES=2", "RING=1"), quick=False),
    Search(
        "three ranks that disagree", ("N=3", "COLLECTIVES=2", "RING=1", "MISMATCH"), quick=False
    ),
    Search("three ranks, one dies", ("N=3", "COLLECTIVES=1", "DEATH"), quick=False),
]

MUTANTS = [
    Search("publishes before it writes", ("M_PUBLISHES_BEFORE_WRITE",)),
    Search("writes again what is unread", ("M_REUSES_UNREAD", "RING=1")),
    Search("says it has read before it reads", ("M_CONSUMES_BEFORE_READ", "RING=1")),
    Search("sleeps without announcing it", ("M_NOT_ANNOUNCED",)),
    Search("looks for sleepers before it stores", ("M_LOOKS_BEFORE_STORE", "RING=1")),
    Search("sleeps without the kernel's compare", ("M_KERNEL_COMPARES_NOT",)),
    Search("has one arrival line", ("M_ONE_ARRIVAL_LINE",)),
    Search("does not compare signatures", ("M_COMPARES_NOT", "MISMATCH")),
    Search("does not look at the life word", ("M_IGNORES_LIFE", "DEATH")),
    Search("takes no last look at the word", ("M_NO_LAST_LOOK",)),
    Search("overwrites an earlier cause", ("M_ABORT_OVERWRITES", "MISMATCH")),
    Search("writes its own record first", ("M_OWN_RECORD_FIRST", "MISMATCH")),
    Search("writes again what it has not copied", ("WRITES_BACK", "SEGMENTS=2", "RING=1")),
    Search("copies results before they are there", ("M_COPIES_UNCONSUMED", "WRITES_BACK")),
    Search(
        "frees a ring under a rank that writes into it",
        ("M_FREES_UNDER_WRITERS", "WRITES_BACK", "N=3", "COLLECTIVES=1", "DEATH"),
        quick=False,
    ),
    Search(
        "does not pass on what it was told",
        ("M_TELLS_NOBODY_ON", "N=3", "COLLECTIVES=2", "MISMATCH"),
        quick=False,
    ),
]


class Missing(Exception):
    """A program that is needed is not there; the text says what to install."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found."""

    error: str  # what the checker says of it, "" if there is none
    states: int  # number of states that were visited
    seconds: float


def check(search: Search) -> Found:
    """Search all interleavings; stop at the first error.

    Raises:
        Missing: spin or the compiler is not installed.
        RuntimeError: the search was cut short, so that it shows nothing.
    """
    for program, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(program) is None:
            raise Missing(
                f"the model is checked by {program}: install it (Debian, Ubuntu: "
                f"apt-get install {package})"
            )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="model-") as folder:

        def run(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            if done.returncode != 0 and command[0] != "./pan":
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            return done.stdout

        run("spin", "-a", *[f"-D{macro}" for macro in search.macros], str(MODEL))
        # The small ones are compiled for longer than they run.
        how = ["-O0"] if search.quick else ["-O2", "-DCOLLAPSE"]
        run("gcc", *how, "-w", "-DSAFETY", "-DMEMLIM=6000", "-o", "pan", "pan.c")
        printed = run("./pan", "-m1000000", "-n")
    states = re.search(r"(\d[\d.e+]*) states, stored", printed)
    errors = re.search(r"errors: (\d+)", printed)
    if (
        not states
        or not errors
        or re.search(r"max search depth|out of memory|hash factor: 0", printed)
    ):
        raise RuntimeError(f"the search of {search.name!r} was cut short:\n{printed}")
    error = re.search(r"pan:\d+: (.*?) \(at depth", printed)
    if bool(error) != (errors[1] != "0"):
        raise RuntimeError(f"the checker's answer is not understood:\n{printed}")
    return Found(error[1] if error else "", int(float(states[1])), time.monotonic() - start)


def main(arguments: list[str] | None = None) -> int:
    """Check all; print a line each; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two ranks only, seconds each")
    options = parser.parse_args(arguments)
    status = 0
    for mutants, searches in ((False, MODELS), (True, MUTANTS)):
        for search in searches:
            if options.quick and not search.quick:
                continue
            try:
                found = check(search)
            except Missing as missing:
                print(missing, file=sys.stderr)
                return 2
            good = bool(found.error) == mutants and (mutants or found.states > LEAST_STATES)
            status |= not good
            what = f"found: {found.error}" if found.error else "no error"
            kind = "mutant" if mutants else "model"
            print(
                f"{'ok ' if good else 'BAD'} {kind:6} {search.name:50} "
                f"{found.states:>10} states {found.seconds:5.1f} s  {what}",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
