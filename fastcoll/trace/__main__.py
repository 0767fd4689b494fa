"""``fastcoll trace PREFIX`` or ``fastcoll trace --pid PID``: compares the ranks, and names the one that diverged.

PREFIX is the value of FASTCOLL_TRACE_DUMP, or a folder of dumps. PID is the process of torchrun, or of a rank: its job
may run or hang, needs no setting, and is not disturbed. ``fastcoll trace --against PREFIX PREFIX`` compares two runs
that FASTCOLL_DIGEST was set for, and prints where their bits first differ. The exit status is 0 if the ranks or runs
agree, 1 if they do not, 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastcoll.trace.against import compare, print_comparison
from fastcoll.trace.analysis import Report, analyse
from fastcoll.trace.contents import Trace
from fastcoll.trace.dumps import parse, read
from fastcoll.trace.flight_recorder import flight_recorder
from fastcoll.trace.live import copy
from fastcoll.trace.processes import read_job
from fastcoll.trace.report import as_json, print_report

__all__ = ["main"]


_STILL = 0.5
"""Seconds after which a rank that is late in a running job would have come."""


def _compare(
    traces: Sequence[Trace], earlier: Report | None = None
) -> tuple[dict[int, dict[str, Any]], Report]:
    """Returns the flight recorder of each rank, and the report."""
    records = {trace.rank: flight_recorder(trace) for trace in traces}
    return records, analyse([parse(record) for record in records.values()], earlier)


def _compare_runs(prefixes: Sequence[str], with_json: bool) -> int:
    """Prints where two runs first differ, and returns the exit status."""
    one, other = ([parse(flight_recorder(trace)) for trace in read(prefix)] for prefix in prefixes)
    comparison = compare(one, other, (prefixes[0], prefixes[1]))
    if with_json:
        print(json.dumps(asdict(comparison), indent=2))
    else:
        print_comparison(comparison, sys.stdout)
    return 1 if comparison.differences else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(prog="fastcoll trace", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "prefix", nargs="?", help="the dumps' names without the rank, or their folder"
    )
    source.add_argument(
        "--pid",
        type=int,
        nargs="+",
        metavar="PID",
        help="a process of the job, or those of all its ranks",
    )
    source.add_argument(
        "--against",
        nargs=2,
        metavar="PREFIX",
        help="compare the dumps of two runs: the first call whose inputs or results differ in a bit",
    )
    parser.add_argument(
        "--save",
        metavar="PREFIX",
        help="with --pid: also write the traces to files, to compare those of several hosts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--flight-recorder",
        metavar="PREFIX",
        help="also write files for torchfrtrace, named PREFIX and the rank",
    )
    options = parser.parse_args(arguments)
    if options.save is not None and options.pid is None:
        parser.error("--save: expected --pid too, because a prefix names files already")
    if options.flight_recorder is not None and options.against is not None:
        parser.error("--flight-recorder: expected the dumps of one run, got --against")
    try:
        if options.against is not None:
            return _compare_runs(options.against, options.json)
        records, report = _compare(
            read(options.prefix) if options.pid is None else read_job(options.pid)
        )
        for rank, record in records.items() if options.save is not None else ():
            content = copy(record["fastcoll"]["pid"], "saved by fastcoll trace")
            Path(f"{options.save}{rank}").write_bytes(content)
        if options.pid is not None and not report.healthy:
            time.sleep(_STILL)
            records, report = _compare(read_job(options.pid), report)
        if options.flight_recorder is not None:
            for rank, record in records.items():
                Path(f"{options.flight_recorder}{rank}").write_bytes(pickle.dumps(record))
    except (OSError, ValueError) as error:
        print(f"fastcoll.trace: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print_report(report, sys.stdout)
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
