"""Every kernel compiles for every GPU, and no row of the recorded table got worse."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import triton

from fastcoll.kernels import _machine_code, report

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "kernels" / "expected_table.json"
ROW = report.Row("k", 90, 40, 0, 32, 6, {"128": 4}, {"128": 2}, True)


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """Of a process that compiles."""
    yield {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.timeout(600)
def test_every_configuration_compiles_and_none_got_worse(
    environment: dict[str, str], tmp_path: Path
) -> None:
    recorded = json.loads(RECORDED.read_text())
    if recorded["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {recorded['triton']}, which `make` installs")
    command = [sys.executable, "-m", "fastcoll.kernels", "--check", str(RECORDED)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"].values()
    assert {row["architecture"] for row in rows} == {80, 90, 100}
    assert not any(row["spills"] for row in rows)
    narrow = [row["name"] for row in rows if row["wide"] and "128" not in row["loads"]]
    assert not narrow


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"resident": 5, "registers": 48}, "expected 6 programs on a multiprocessor"),
        ({"spills": 8}, "expected no spills, got 8 bytes"),
        ({"loads": {"64": 8}}, "expected 128-bit loads"),
        ({"stores": {"32": 1, "128": 2}}, "expected stores {'128': 2}, got"),
        ({"name": "other"}, "not in the recorded table"),
    ],
)
def test_a_row_that_got_worse_is_a_fault(changes: dict[str, object], fault: str) -> None:
    found = report.compare([replace(ROW, **changes)], {ROW.key: asdict(ROW)})
    assert any(fault in line for line in found), found


def test_a_row_that_got_better_is_none() -> None:
    better = replace(ROW, registers=32, resident=8)
    assert report.compare([better], {ROW.key: asdict(ROW)}) == []


def test_a_configuration_that_is_gone_is_a_fault() -> None:
    assert report.compare([], {ROW.key: {}}) == [f"{ROW.key}: recorded, but no configuration now"]


def test_widths_are_those_of_the_main_path() -> None:
    code = [
        (0x00, "LDG.E.64 R2, desc[UR4][R2.64]"),
        (0x10, "@!P0 BRA 0x50"),
        (0x20, "LDG.E.128 R4, desc[UR4][R2.64]"),
        (0x30, "STG.E.U16 desc[UR4][R2.64], R4"),
        (0x40, "EXIT"),
        (0x50, "LDG.E.STRONG.SYS R4, desc[UR4][R2.64]"),
        (0x60, "STG.E desc[UR4][R2.64], R4"),
    ]
    assert _machine_code.widths(code) == ({"128": 1}, {"16": 1})
    assert _machine_code.widths(code[5:]) == ({"32": 1}, {"32": 1})
    assert _machine_code.spill_instructions([(0, "STL.64 [R1], R2"), (16, "LDL R2, [R1]")]) == 2


def test_interpreted_kernels_are_not_reported(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastcoll.kernels"],
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    assert "expected TRITON_INTERPRET to be unset" in done.stderr
