"""Applies the defects of mutants.txt one by one, and reports which tests find each.

    python tools/mutants.py [--only NAME ...] [--shard 1/4] [--list] [--tier named|test|all] [--json FILE]

The program builds and tests a copy of the tree, build/mutants/tree; it does not touch the user's tree. For each defect
it runs the tests that the row names, then the short tier, then the tests marked ``full``. The search ends at the first
failure, or after the tier of ``--tier``. A test that hangs has found the defect too. A test that also fails without a
defect finds nothing. So the named tests run first on the clean copy, and at the end the other tests that failed.

Exit status: 0; 1 if the short tier misses a defect; 2 if a defect cannot be applied or built, if a row names no test of
the short tier, or if a test fails without a defect.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants_copy import (
    CLEAN,
    COPY,
    PACKAGE,
    ROOT,
    Unusable,
    build,
    keep_outputs,
    make_package,
    run,
    synchronize,
)

ITEM_SECONDS = 60
SHORT = "not full and not gpu"
FULL = "full and not gpu"
WORKERS = ("-n", "3", "--dist", "loadfile")


@dataclass(frozen=True)
class Mutant:
    """A defect, written by hand: a reviewer could miss it, and the tests must find it.

    Attributes:
        name: Name of the defect.
        file: Its file, relative to the root.
        old: Text that occurs once in the file.
        new: The replacement.
        tests: Files or tests of the short tier that are likely to find it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def parsed(table: str) -> Iterator[Mutant]:
    """Yields the defects of a table, whose first lines describe its form."""
    for row in table.rstrip("\n").split("\n\n"):
        head, *lines = row.split("\n")
        if head.startswith("#"):
            continue
        name, file, tests = head.split(" | ")
        assert all(line[0] in "-+" for line in lines), name
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mutant(name, file, old, new, tuple(tests.split()))


MUTANTS = tuple(parsed(Path(__file__).with_suffix(".txt").read_text()))


@dataclass(frozen=True)
class Stage:
    """Tests that run together.

    Attributes:
        found_by: Their tier.
        marks: pytest's mark expression that selects them.
        seconds: How long they may take together.
        options: Options for pytest.
    """

    found_by: str
    marks: str
    seconds: int
    options: tuple[str, ...] = ()


NAMED = Stage("test", SHORT, 400)
TEST = Stage("test", SHORT, 1200, WORKERS)
ALL = Stage("all", FULL, 3600, WORKERS)
STAGES = (NAMED, TEST, ALL)
TIERS = ("named", "test", "all")


@dataclass(frozen=True)
class Outcome:
    """The result for a defect.

    Attributes:
        name: Name of the defect.
        found_by: "test", "all" or "".
        by_named: Whether a test that its row names has found it.
        failure: The first test that failed, with "hang: " before it if it did not end; or only "hang".
        seconds: Duration of the build and the tests.
    """

    name: str
    found_by: str
    by_named: bool
    failure: str
    seconds: float


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Puts a defect into the copy; at the end removes it and restores the build's outputs.

    Raises:
        Unusable: The text to replace does not occur exactly once.
    """
    path = COPY / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (count := text.count(mutant.old)) != 1:
        raise Unusable(f"{mutant.file} has the lines that it replaces {count} times, not once")
    before = path.stat()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        keep_outputs(CLEAN, COPY)
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- the tests -----------------------------------------------------------------------------------


def pytest(tests: Sequence[str], stage: Stage, more: Sequence[str] = ()) -> tuple[int | None, str]:
    """Runs tests of the copy, from the package's folder, so that nothing else is imported."""
    command: list[str | Path] = [
        *(sys.executable, "-m", "pytest", "-c", COPY / "pyproject.toml", "--rootdir", COPY),
        *("-q", "-rfE", "--tb=short", "--timeout", str(ITEM_SECONDS), "-p", "no:cacheprovider"),
        *("-m", stage.marks, *stage.options, *more),
        *(COPY / test for test in tests),
    ]
    return run(command, PACKAGE, stage.seconds)


def failures(output: str) -> list[str]:
    """Returns the failed tests in pytest's summary, relative to the copy."""
    lines = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return [re.sub(r"^.*?(?=tests/)", "", line) for line in lines]


def first_failure(tests: Sequence[str], stage: Stage) -> str:
    """Returns the first test that fails, or "".

    Raises:
        Unusable: There are no tests, or pytest could not run them.
    """
    status, output = pytest(tests, stage, ["-x"])
    if status is None:
        return "hang"
    if status == 0:
        return ""
    failed = failures(output)
    if status in (3, 4, 5) or (status > 0 and not failed):
        raise Unusable(f"pytest ended with {status} on {' '.join(tests)}:\n{output[-3000:]}")
    first = failed[0] if failed else f"pytest ended by signal {-status}"
    hangs = "from pytest-timeout" in output or "Timeout (>" in output
    return f"hang: {first}" if hangs else first


def require_clean(tests: Sequence[str], marks: str) -> None:
    """Checks that tests pass on the copy without a defect.

    Raises:
        Unusable: A test fails.
    """
    if not tests:
        return
    stage = Stage("", marks, 2400, WORKERS)
    status, output = pytest(tests, stage)
    if status != 0:
        raise Unusable(
            f"tests that fail without a defect find none ({status}): {' '.join(failures(output))}\n{output[-3000:]}"
        )


def look(mutant: Mutant, tier: str) -> Outcome:
    """Searches for a defect in the built copy, which is clean again afterwards.

    Raises:
        Unusable: The defect cannot be applied or built, or its row names no tests.
    """
    began = time.monotonic()
    found_by = failure = ""
    by_named = False
    with applied(mutant):
        if mutant.file.startswith("csrc/"):
            build()
        for stage in STAGES[: TIERS.index(tier) + 1]:
            if failure := first_failure(mutant.tests if stage is NAMED else ["tests"], stage):
                found_by, by_named = stage.found_by, stage is NAMED
                break
    seconds = round(time.monotonic() - began, 1)
    return Outcome(mutant.name, found_by, by_named, failure, seconds)


# --- the table -----------------------------------------------------------------------------------


def line_of(outcome: Outcome) -> str:
    """Returns a row of the table."""
    where = {"test": "short tier", "all": "full", "": "-"}[outcome.found_by]
    return f"{outcome.name:52} {where:11} {outcome.seconds:6.1f} s  {outcome.failure or '-'}"


def verdict(outcomes: Sequence[Outcome], tier: str) -> list[str]:
    """Returns the suite's shortcomings."""
    searched = "tests of its row miss" if tier == "named" else "short tier misses"
    return [
        f"{outcome.name}: the {searched} it" for outcome in outcomes if outcome.found_by != "test"
    ]


def shard(text: str) -> tuple[int, int]:
    """Returns the two numbers of "1/4".

    Raises:
        ValueError: The text is no part of a whole.
    """
    index, number = map(int, text.split("/"))
    if not 1 <= index <= number:
        raise ValueError(text)
    return index, number


def arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these defects")
    parser.add_argument(
        "--shard", type=shard, default=(1, 1), metavar="I/N", help="the I-th of N parts"
    )
    parser.add_argument("--list", action="store_true", help="print the defects and end")
    parser.add_argument(
        "--tier", choices=TIERS, default="all", help="which tests run at most, where none fails"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    given = parser.parse_args()
    known = {mutant.name for mutant in MUTANTS}
    if strange := sorted(set(given.only or ()) - known):
        parser.error(f"--only: there is no defect {', '.join(strange)}; --list prints them")
    return given


def main() -> int:
    """Searches for all requested defects."""
    given = arguments()
    index, number = given.shard
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.name in given.only]
    chosen = chosen[index - 1 :: number]
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:52} {mutant.file}")
            if (ROOT / mutant.file).read_text().count(mutant.old) != 1:
                print(f"{mutant.name}: {mutant.file} must have its text once", file=sys.stderr)
                return 2
        return 0
    COPY.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds run(), which ends its command
    outcomes: list[Outcome] = []
    errors: list[str] = []
    named = sorted({test for mutant in chosen for test in mutant.tests})
    try:
        synchronize()
        build()
        shutil.rmtree(CLEAN, ignore_errors=True)
        keep_outputs(COPY, CLEAN)
        make_package()
        require_clean(named, SHORT)
        for mutant in chosen:
            try:
                outcomes.append(look(mutant, given.tier))
                print(line_of(outcomes[-1]), flush=True)
            except Unusable as error:
                errors.append(f"{mutant.name}: {error}")
                print(f"{mutant.name:52} error", flush=True)
        later = {
            outcome.failure for outcome in outcomes if outcome.found_by and not outcome.by_named
        }
        require_clean(sorted(test for test in later if test.startswith("tests/")), "not gpu")
    except Unusable as error:
        errors.append(str(error))
    if given.json:
        given.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
        )
    wrong = verdict(outcomes, given.tier)
    found = sum(outcome.found_by == "test" for outcome in outcomes)
    print(f"\nThe short tier finds {found} of {len(outcomes)} defects.")
    print("\n".join([*errors, *wrong]))
    return 2 if errors else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
