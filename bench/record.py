"""Records of measurements: files of JSON lines, the run in the first, a case in each of the others. Needs no torch.

The line of the run has the conditions besides the code: machine, versions, command line. Derived values are not in a
record: its readers compute ratios and bandwidths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["medians", "read_record", "write_record"]

_DIGITS = 5


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a record, and makes its folder; floating-point numbers keep 5 digits.

    Args:
        path: The file, ``*.jsonl``.
        record: Record of the run, with a list of ``cases``.
    """
    run = {key: value for key, value in record.items() if key != "cases"}
    lines = [json.dumps(_rounded(line)) + "\n" for line in (run, *record["cases"])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def read_record(path: Path) -> dict[str, Any]:
    """Returns a record, with its list of ``cases``.

    Raises:
        OSError: There is no such file.
        ValueError: The file is no record.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path}: expected a JSON object in each line, the run in the first")
    return {**lines[0], "cases": lines[1:]}


def medians(case: dict[str, Any]) -> dict[str, float]:
    """Returns the median of each backend's times in a case."""
    return {name: one["time"]["median"] for name, one in case["backends"].items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
