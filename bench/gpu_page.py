"""``python -m fastcoll.bench.gpu_page FOLDER``: what ``make gpu`` found on a machine's GPU, on one page.

Reads what its parts left in the folder, tests_*.xml of pytest and records of benchmarks, prints the page and writes it
to gpu.md there. What a part did not leave is named as missing, and the exit status is 1 then, or when a test failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fastcoll import info
from fastcoll.bench.ddp import added, added_by_profile
from fastcoll.bench.record import read_record

__all__ = ["BENCHMARKS", "PARTS", "Tests", "main", "page", "read_tests"]

PARTS = ("kernels", "engine")
"""What tests_*.xml are named after."""

_LONGEST = 160  # characters of a failure


@dataclass(frozen=True)
class Tests:
    """How the tests of a part ended.

    Attributes:
        passed: How many did.
        skipped: How many were skipped.
        failed: The others, with the first line of why.
        seconds: Of all.
    """

    passed: int
    skipped: int
    failed: dict[str, str]
    seconds: float


def read_tests(path: Path) -> Tests:
    """Reads a file of pytest's ``--junitxml``.

    Raises:
        OSError: It is not there.
        ElementTree.ParseError: It is not whole: its process was ended.
    """
    failed: dict[str, str] = {}
    count, skipped, seconds = 0, 0, 0.0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        count += 1
        seconds += float(case.get("time", 0))
        skipped += case.find("skipped") is not None
        for fault in (*case.iter("failure"), *case.iter("error")):
            text = (fault.get("message") or fault.text or "").strip().partition("\n")[0]
            failed[f"{case.get('classname')}::{case.get('name')}"] = text[:_LONGEST]
    return Tests(count - skipped - len(failed), skipped, failed, seconds)


def _kernels(record: dict[str, Any]) -> Iterable[str]:
    met = [target["met"] for target in record["targets"]]
    yield f"{len(record['cases'])} cases, {sum(met)} of {len(met)} targets met" + (
        "" if record["complete"] else "; time was up before the last case"
    )
    for target in record["targets"]:
        if not target["met"]:
            limit = (
                f"at least {target['at_least']}"
                if "at_least" in target
                else f"at most {target['at_most']}"
            )
            yield f"missed: {target['name']}: {target['value']:.2f}, {limit}"
    yield from (f"failed: {name}: {text}" for name, text in record["failed"].items())


def _engine(record: dict[str, Any]) -> Iterable[str]:
    times = [case["time"] for case in record["cases"]]
    ratios = [time["fastcoll"]["median"] / time["nccl"]["median"] for time in times]
    yield (
        f"the host's time of a call, fastcoll over nccl: median of {len(ratios)} cases "
        f"{statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
    )


def _all_reduce(record: dict[str, Any]) -> Iterable[str]:
    for case in record["cases"]:
        times = ", ".join(
            f"{name} {backend['time']['median']:.1f} us"
            for name, backend in case["backends"].items()
        )
        wrong = sum(backend["wrong"] or 0 for backend in case["backends"].values())
        yield f"{case['size']} bytes: {times}" + (f"; {wrong} wrong elements" if wrong else "")


def _steps(record: dict[str, Any]) -> Iterable[str]:
    for row in record["cases"]:
        for case, time in zip(row["cases"], added(row), strict=True):
            way = f"{row['model']}, {case['backend']}, {case['buckets']}"
            text = f"{way}: {time.by_median:.0f} us more than without DDP"
            if more := added_by_profile(row, case):
                text += (
                    f"; the host {more.host_microseconds:.0f} us, {more.launches:.0f} launches of "
                    f"{more.launch_microseconds:.0f} us beside the collectives"
                )
            yield text + (f"; {case['wrong']} wrong elements" if case["wrong"] else "")
        for name, why in row.get("failed", {}).items():
            yield f"failed: {row['model']}, {name}: {why}"


BENCHMARKS: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "kernels_cuda.jsonl": _kernels,
    "engine_cuda.jsonl": _engine,
    "all_reduce_cuda_1rank.jsonl": _all_reduce,
    "ddp_cuda_1rank.jsonl": _steps,
}
"""By file: what the page says of a record."""


def _tests(folder: Path) -> tuple[list[str], bool]:
    lines, well = (
        ["| tests | passed | failed | skipped | seconds |", "| --- | --: | --: | --: | --: |"],
        True,
    )
    faults: list[str] = []
    for part in PARTS:
        try:
            found = read_tests(folder / f"tests_{part}.xml")
        except (OSError, ElementTree.ParseError) as error:
            lines.append(f"| {part} | missing: {type(error).__name__} | | | |")
            well = False
            continue
        cells = (part, found.passed, len(found.failed), found.skipped, f"{found.seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        faults += [f"- **{name}**: {text}" for name, text in found.failed.items()]
        well = well and found.passed > 0 and not found.failed
    return [*lines, "", *faults], well


def _benchmarks(folder: Path) -> tuple[list[str], bool]:
    lines: list[str] = []
    well = True
    for name, says in BENCHMARKS.items():
        try:
            record = read_record(folder / name)
            said = [f"- {line}" for line in says(record)]
            lines += [
                f"### {name}",
                "",
                f"`{record['command']}`, revision {record['revision']}",
                "",
                *said,
                "",
            ]
        except (OSError, ValueError, KeyError) as error:
            lines += [
                f"### {name}",
                "",
                f"- missing, or not whole: {type(error).__name__}: {error}",
                "",
            ]
            well = False
    return lines, well


def page(folder: Path, report: dict[str, Any], gpus: Sequence[str]) -> tuple[str, bool]:
    """Returns the page, and whether all parts are there and no test failed.

    Args:
        folder: Where the parts left their files.
        report: Of ``fastcoll.info.collect``.
        gpus: Names of the devices.
    """
    tests, passed = _tests(folder)
    benchmarks, complete = _benchmarks(folder)
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    files = [*BENCHMARKS, *(f"tests_{part}.xml" for part in PARTS)]
    lines = [
        f"# fastcoll on {', '.join(gpus) or 'no GPU'}",
        "",
        versions,
        "",
        "## Tests",
        "",
        *tests,
        "",
        "## Benchmarks",
        "",
        *benchmarks,
        "## What to send us",
        "",
        f"Open an issue with this page and the files beside it, also where something failed: {', '.join(files)}.",
    ]
    return "\n".join(lines) + "\n", passed and complete


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page.

    Returns:
        The exit status: 0, or 1 if something is missing or a test failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench.gpu_page", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="OUT of make gpu")
    folder = parser.parse_args(arguments).folder
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text, well = page(folder, info.collect(), gpus)
    (folder / "gpu.md").write_text(text)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
