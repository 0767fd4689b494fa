"""Every kernel compiles for every GPU, and no row of the recorded table got worse."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import kernel_table
import machine_code
import pytest
import triton
from kernel_cases import in_a_process_that_compiles
from kernel_table import KERNEL_MODULES, RECORDED

ROW = kernel_table.Row("k", 90, 40, 0, 32, 6, {"128": 4}, {"128": 2}, True)


FIRST_OF_EACH = """
import importlib, sys
import kernel_table
modules = [importlib.import_module(f"fastcoll.kernels.{name}") for name in sys.argv[1:]]
first = [next(iter(module.configurations())) for module in modules]
print(*(fault for row in kernel_table.analyse(first, [90]) for fault in row.faults()))
"""


def output_of(*arguments: str) -> str:
    done = in_a_process_that_compiles(*arguments)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_configuration_compiles_and_none_got_worse(tmp_path: Path) -> None:
    """Machine code is compared with that of the recorded Triton only; spills and narrow accesses are none of any."""
    found = tmp_path / "rows.json"
    same = json.loads(RECORDED.read_text())["triton"] == triton.__version__
    check = ["--check"] if same else []
    output_of("-m", "kernel_table", *check, "--json", str(found))
    rows = json.loads(found.read_text())["rows"].values()
    assert {row["architecture"] for row in rows} == {80, 90, 100}
    assert {row["name"].split()[0] for row in rows} == set(KERNEL_MODULES)
    assert not any(row["spills"] for row in rows)
    narrow = [row["name"] for row in rows if row["wide"] and "128" not in row["loads"]]
    assert not narrow


def test_a_kernel_of_each_kind_compiles_for_hopper() -> None:
    """One configuration each; all parts that kernels share are in these four."""
    kinds = ("unflatten", "reduce", "one_shot", "ring")
    assert output_of("-c", FIRST_OF_EACH, *kinds).strip() == ""


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
    found = kernel_table.compare([replace(ROW, **changes)], {ROW.key: asdict(ROW)})
    assert any(fault in line for line in found), found


def test_a_row_that_got_better_is_none() -> None:
    better = replace(ROW, registers=32, resident=8)
    assert kernel_table.compare([better], {ROW.key: asdict(ROW)}) == []


def test_a_configuration_that_is_gone_is_a_fault() -> None:
    assert kernel_table.compare([], {ROW.key: {}}) == [
        f"{ROW.key}: recorded, but no configuration now"
    ]


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
    assert machine_code.widths(code) == ({"128": 1}, {"16": 1})
    assert machine_code.widths(code[5:]) == ({"32": 1}, {"32": 1})
    assert machine_code.spill_instructions([(0, "STL.64 [R1], R2"), (16, "LDL R2, [R1]")]) == 2


def test_interpreted_kernels_are_not_reported() -> None:
    with pytest.raises(RuntimeError, match="expected TRITON_INTERPRET to be unset"):
        kernel_table.collect()
