"""Command line: runs the suites, compares, prints a table and writes the record."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from fastcoll.bench.record import write_record
from torch_suites import source
from torch_suites.outcomes import Comparison, Pair, first_error
from torch_suites.runs import BUILD, SuiteFiles
from torch_suites.suites import NOT_APPLICABLE, OPTIONAL, SUITES, files_of

TEST_SECONDS, FILE_SECONDS = 60.0, 600.0  # limits
ROUNDS = 3  # of a test that differs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torch_suites", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suite",
        action="append",
        choices=[*SUITES, "all"],
        help=f"default: all but {', '.join(OPTIONAL)}",
    )
    parser.add_argument("--file", action="append", help="only this file, below test/distributed")
    parser.add_argument("--source", help="a PyTorch source tree in place of Debian's package")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="gloo runs only the tests that fastcoll does not pass; half the time",
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    return parser.parse_args()


def _compare(
    gloo: SuiteFiles,
    fastcoll: SuiteFiles,
    suite: str,
    file: str,
    comparison: Comparison,
    quick: bool,
) -> None:
    """Runs a file on both, and what differs again; prints the outcome."""
    on_fastcoll = fastcoll.run(file, FILE_SECONDS)
    failed = [test for test, told in on_fastcoll[0].items() if told["outcome"] != "passed"]
    on_gloo = gloo.run(file, FILE_SECONDS, failed if quick else None)
    differing = comparison.add(suite, file, on_gloo, on_fastcoll)
    passed = [
        f"{sum(o['outcome'] == 'passed' for o in found.values())}/{len(found)}"
        for found, _ in (on_gloo, on_fastcoll)
    ]
    print(f"{suite:12}{file:60}{passed[0]:>9}{passed[1]:>9}", flush=True)
    if not differing:
        return
    for each in [gloo, fastcoll] * (ROUNDS - 1):
        found, told = each.run(file, FILE_SECONDS, [name.split("::")[1] for name in differing])
        for name, pair in differing.items():
            missing = {"outcome": "not run", "detail": told}
            getattr(pair, each.backend).append(found.get(name.split("::")[1], missing))
    for name, pair in differing.items():
        state = "FAILS" if pair.worse else "unsteady"
        print(f"  {state} {name}: {first_error(pair.detail)}", flush=True)
    _save_details(file, differing)


def _save_details(file: str, differing: dict[str, Pair]) -> None:
    folder = BUILD / "details"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"=== {name}\n{pair.detail}\n" for name, pair in differing.items()]
    (folder / f"{file.replace('/', '.')}.txt").write_text("".join(parts))


def _print_table(comparison: Comparison) -> None:
    shown = ("passed", "failed", "skipped", "not run")
    print(f"\n{'suite':12}{'gloo: ' + ', '.join(shown):40}{'fastcoll: the same':40}fastcoll fails")
    for suite, pairs in comparison.suites.items():
        counts = [comparison.counts(suite, backend) for backend in ("gloo", "fastcoll")]
        cells = "".join(f"{each[outcome]:<10}" for each in counts for outcome in shown)
        print(f"{suite:12}{cells}{sum(pair.worse for pair in pairs.values())}")


def main() -> int:
    """Runs what the command line asks for; returns 1 if fastcoll fails what gloo passes."""
    options = _arguments()
    chosen = options.suite or [suite for suite in SUITES if suite not in OPTIONAL]
    torch_version = importlib.metadata.version("torch").split("+")[0]
    version, test = source.fetch(torch_version, options.source)
    print(f"PyTorch's test files {version}, torch {torch_version}", flush=True)
    files = files_of(test / "distributed", list(SUITES) if "all" in chosen else chosen)
    comparison = Comparison()
    gloo, fastcoll = (SuiteFiles(test, b, TEST_SECONDS) for b in ("gloo", "fastcoll"))
    record = comparison.record(NOT_APPLICABLE)
    try:
        for suite, names in files.items():
            for file in names:
                if options.file and file not in options.file:
                    continue
                _compare(gloo, fastcoll, suite, file, comparison, options.quick)
                record = comparison.record(NOT_APPLICABLE)
                if options.json:
                    others = [{name: found} for name, found in record.items() if name != "suites"]
                    run = {"torch": torch_version, "test_files": version}
                    write_record(options.json, {**run, "cases": record["suites"] + others})
    finally:
        gloo.close()
        fastcoll.close()
    _print_table(comparison)
    fails = record["fastcoll_fails"].values()
    counted = sum("not_applicable" not in row for row in fails)
    unknown = len(record["not_compared"])
    print(
        f"{sum(map(len, comparison.suites.values()))} tests: {counted} that gloo passes and fastcoll "
        f"does not, {unknown} that fastcoll fails and gloo was not in time for"
    )
    return 1 if counted or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
