"""``fastcoll trace PREFIX``: reads the dumps of all ranks and names the rank that diverged, and the call.

PREFIX is the value of FASTCOLL_TRACE_DUMP, or a folder of dumps. The exit status is 0 if the ranks agree, 1 if
they do not, 2 if there is nothing to read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fastcoll.trace.analysis import analyse
from fastcoll.trace.dumps import read
from fastcoll.trace.report import as_json, print_report

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(prog="fastcoll trace", description=__doc__)
    parser.add_argument("prefix", help="the dumps' names without the rank, or their folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        report = analyse(read(options.prefix))
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
