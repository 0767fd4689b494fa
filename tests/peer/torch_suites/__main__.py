"""Command line: runs the suites, compares, prints a table and writes the record."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from fastcoll.bench.record import write_record
from torch_suites import source
from torch_suites.outcomes import Comparison, Outcome, Pair, first_error
from torch_suites.runs import FileOutcomes, SuiteFiles
from torch_suites.suites import NOT_APPLICABLE, OPTIONAL, SUITES, files_of


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torch_suites", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suite",
        action="append",
        choices=[*SUITES, "all"],
        help=f"default: all but {', '.join(OPTIONAL)}",
    )
    parser.add_argument("--file", action="append", help="only this file, below test/distributed")
    parser.add_argument("--backend", default="fastcoll", help="what is put in gloo's place")
    parser.add_argument("--source", help="a PyTorch source tree in place of Debian's package")
    parser.add_argument("--test-seconds", type=float, default=60.0, help="limit for a test")
    parser.add_argument("--file-seconds", type=float, default=600.0, help="limit for a file")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a test that differs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="gloo runs only the tests that the other backend does not pass; half the time",
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    return parser.parse_args()


def _run_on_both(
    backends: list[SuiteFiles], file: str, options: argparse.Namespace
) -> list[tuple[FileOutcomes, str]]:
    gloo, peer = backends
    on_peer = peer.run(file, options.file_seconds)
    only = None
    if options.quick:
        only = [test for test, told in on_peer[0].items() if told["outcome"] != "passed"]
    return [gloo.run(file, options.file_seconds, only), on_peer]


def _rerun(
    backends: list[SuiteFiles], file: str, differing: dict[str, Pair], options: argparse.Namespace
) -> None:
    tests = [name.split("::")[1] for name in differing]
    for _ in range(options.rounds - 1):
        for each in backends:
            outcomes, told = each.run(file, options.file_seconds, tests)
            for test in tests:
                pair = differing[f"{file}::{test}"]
                missing: Outcome = {"outcome": "not run", "detail": told, "seconds": 0.0}
                rounds = pair.gloo if each.backend == "gloo" else pair.peer
                rounds.append(outcomes.get(test, missing))


def _save_details(folder: Path, file: str, differing: dict[str, Pair]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, pair in differing.items():
        wrong = next(o for o in pair.peer if o["outcome"] != "passed")
        parts.append(f"=== {name}\n{wrong['detail']}\n")
    (folder / f"{file.replace('/', '.')}.txt").write_text("".join(parts))


def _print_table(comparison: Comparison) -> None:
    shown = ("passed", "failed", "skipped", "not run")
    peer = comparison.backend
    print(f"\n{'suite':12}{'gloo: ' + ', '.join(shown):36}{peer + ': the same':36}{peer} fails")
    for suite, pairs in comparison.suites.items():
        cells = []
        for on_gloo in (True, False):
            counts = comparison.counts(suite, on_gloo)
            cells.append("".join(f"{counts[outcome]:<9}" for outcome in shown))
        worse = sum(pair.worse for pair in pairs.values())
        print(f"{suite:12}{cells[0]}{cells[1]}{worse}")


def main() -> int:
    """Runs what the command line asks for; returns 1 if fastcoll fails what gloo passes."""
    options = _arguments()
    chosen = options.suite or [suite for suite in SUITES if suite not in OPTIONAL]
    torch_version = importlib.metadata.version("torch").split("+")[0]
    version, test = source.fetch(torch_version, options.source)
    print(f"PyTorch's test files {version}, torch {torch_version}", flush=True)
    files = files_of(test / "distributed", list(SUITES) if "all" in chosen else chosen)
    comparison = Comparison(options.backend)
    backends = [SuiteFiles(test, b, options.test_seconds) for b in ("gloo", options.backend)]
    record = {}
    try:
        for suite, names in files.items():
            for file in names:
                if options.file and file not in options.file:
                    continue
                told = _run_on_both(backends, file, options)
                differing = comparison.add(suite, file, *told)
                passed = [
                    f"{sum(o['outcome'] == 'passed' for o in found.values())}/{len(found)}"
                    for found, _ in told
                ]
                print(f"{suite:12}{file:60}{passed[0]:>9}{passed[1]:>9}", flush=True)
                if differing:
                    _rerun(backends, file, differing, options)
                    _save_details(source.BUILD / "details", file, differing)
                for name, pair in differing.items():
                    wrong = next(o for o in pair.peer if o["outcome"] != "passed")
                    state = "FAILS" if pair.worse else "unsteady"
                    print(f"  {state} {name}: {first_error(wrong['detail'])}", flush=True)
                record = comparison.record(NOT_APPLICABLE)
                if options.json:
                    suites = [{"suite": name, **row} for name, row in record["suites"].items()]
                    others = [{name: found} for name, found in record.items() if name != "suites"]
                    run = {
                        "torch": torch_version,
                        "test_files": version,
                        "backend": options.backend,
                    }
                    write_record(options.json, {**run, "cases": suites + others})
    finally:
        for each in backends:
            each.close()
    _print_table(comparison)
    fails = record.get(f"{options.backend}_fails", {})
    counted = [name for name, row in fails.items() if "not_applicable" not in row]
    unknown = record.get("not_compared", {})
    print(
        f"{len(comparison.pairs())} tests: {len(counted)} that gloo passes and {options.backend} does "
        f"not, {len(unknown)} that {options.backend} fails and gloo was not in time for"
    )
    return 1 if counted or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
