"""``python -m fastcoll.bench.gpu_page FOLDER``: the results of ``make gpu`` on a machine's GPU, on one page.

Reads the files in the folder, pytest's tests_*.xml and records of benchmarks. Prints the page, and writes it to gpu.md
there. The page names missing files. The exit status is 1 if a file is missing or a test failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from fastcoll import info
from fastcoll.bench.ddp import added, added_by_profile
from fastcoll.bench.record import medians, read_record
from fastcoll.bench.report import target_text
from fastcoll.bench.table import markdown

__all__ = ["PARTS", "main", "page"]

PARTS = ("kernels", "engine")
"""The parts in the names of tests_*.xml."""

_LONGEST = 160  # characters of a failure


def _tests(path: Path) -> tuple[list[str], list[str]]:
    """Returns the cells of a file of pytest's ``--junitxml``, and a line for each test that failed.

    Raises:
        OSError: The file is missing.
        ElementTree.ParseError: The file is incomplete, because its process was ended.
    """
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    faults = []
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            text = (fault.get("message") or fault.text or "").strip().partition("\n")[0]
            name = f"{case.get('classname')}::{case.get('name')}"
            faults.append(f"- **{name}**: {text[:_LONGEST]}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    counts = (len(cases) - skipped - len(faults), len(faults), skipped, round(seconds))
    if counts[:2] == (0, 0):
        faults = [f"- no test of {path.name} ran"]
    return [str(count) for count in counts], faults


def _kernels(record: dict[str, Any]) -> Iterable[str]:
    met = [target["met"] for target in record["targets"]]
    late = "" if record["complete"] else "; time was up before the last case"
    yield f"{len(record['cases'])} cases, {sum(met)} of {len(met)} targets met{late}"
    for target in record["targets"]:
        if not target["met"]:
            yield f"missed: {target_text(target)}"
    for name, text in record["failed"].items():  # the last line of a traceback
        yield f"failed: {name}: {text.strip().splitlines()[-1]}"


def _engine(record: dict[str, Any]) -> Iterable[str]:
    times = [case["time"] for case in record["cases"]]
    ratios = [time["fastcoll"]["median"] / time["nccl"]["median"] for time in times]
    yield (
        f"the host's time of a call, fastcoll over nccl: median of {len(ratios)} cases "
        f"{statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
    )


def _wrong(count: int | None) -> str:
    return f"; {count} wrong elements" if count else ""


def _all_reduce(record: dict[str, Any]) -> Iterable[str]:
    for case in record["cases"]:
        times = (f"{name} {time:.1f} us" for name, time in medians(case).items())
        wrong = sum(one["wrong"] or 0 for one in case["backends"].values())
        yield f"{case['size']} bytes: {', '.join(times)}{_wrong(wrong)}"


def _steps(record: dict[str, Any]) -> Iterable[str]:
    for row in record["cases"]:
        for case, time in added(row):
            text = (
                f"{row['model']}, {case['backend']}, {case['buckets']}: "
                f"{time.by_median:.0f} us more than without DDP"
            )
            if more := added_by_profile(row, case):
                text += (
                    f"; the host {more.host_microseconds:.0f} us, {more.launches:.0f} launches of "
                    f"{more.launch_microseconds:.0f} us beside the collectives"
                )
            yield text + _wrong(case["wrong"])
        for name, why in row.get("failed", {}).items():
            yield f"failed: {row['model']}, {name}: {why}"


_BENCHMARKS: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "kernels_cuda.jsonl": _kernels,
    "engine_cuda.jsonl": _engine,
    "all_reduce_cuda_1rank.jsonl": _all_reduce,
    "ddp_cuda_1rank.jsonl": _steps,
}
"""By file: the function that returns the page's lines about a record."""


def page(folder: Path, report: dict[str, Any], gpus: Sequence[str]) -> tuple[str, bool]:
    """Returns the page, and whether no part is missing and no test failed.

    Args:
        folder: Folder with the files of all parts.
        report: Report of ``fastcoll.info.collect``.
        gpus: Names of the devices.
    """
    rows, faults, whole = [], [], True
    for part in PARTS:
        try:
            cells, failed = _tests(folder / f"tests_{part}.xml")
            faults += failed
        except (OSError, ElementTree.ParseError) as error:
            cells, whole = [f"missing: {type(error).__name__}", "", "", ""], False
        rows.append([part, *cells])
    measured = []
    for name, read in _BENCHMARKS.items():
        measured += ["", f"### {name}", ""]
        try:
            record = read_record(folder / name)
            found = [f"- {line}" for line in read(record)]
            measured += [f"`{record['command']}`, revision {record['revision']}", "", *found]
        except (OSError, ValueError, KeyError) as error:
            measured.append(f"- missing, or not whole: {type(error).__name__}: {error}")
            whole = False
    versions = (f"{name} {value}" for name, value in report["versions"].items() if value)
    lines = [
        *(f"# fastcoll on {', '.join(gpus) or 'no GPU'}", "", ", ".join(versions), ""),
        *("## Tests", "", *markdown("tests | passed | failed | skipped | seconds", rows)),
        *("", *faults, "", "## Benchmarks", *measured, "", "## What to send us", ""),
        "Open an issue with this page and the files beside it, also where something failed:",
        ", ".join([*_BENCHMARKS, *(f"tests_{part}.xml" for part in PARTS)]) + ".",
    ]
    return "\n".join(lines) + "\n", whole and not faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page.

    Returns:
        The exit status: 0, or 1 if a part is missing or a test failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.gpu_page", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="OUT of make gpu")
    folder = parser.parse_args(arguments).folder
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text, well = page(folder, info.collect(), gpus)
    (folder / "gpu.md").write_text(text)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
