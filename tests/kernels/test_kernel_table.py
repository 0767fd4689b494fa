"""The table of compiled kernels: what is read off their code, and how it is compared with the recorded one."""

from dataclasses import asdict, replace

import kernel_table
import machine_code
import pytest

ROW = kernel_table.Row("k", 90, 40, 0, 32, 6, {"128": 4}, {"128": 2}, True)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spills": 8}, "expected no spills, got 8 bytes"),
        ({"loads": {"64": 8}}, "expected 128-bit loads"),
    ],
)
def test_a_row_with_a_fault(changes, fault):
    (found,) = replace(ROW, **changes).faults()
    assert fault in found


def test_rows_that_are_not_as_recorded():
    recorded = {ROW.key: asdict(ROW), "gone sm_90": {}}
    assert kernel_table.compare([ROW], {ROW.key: asdict(ROW)}) == []
    found = kernel_table.compare([replace(ROW, registers=41), replace(ROW, name="new")], recorded)
    assert [line.split(":")[0] for line in found] == [ROW.key, "gone sm_90", "new sm_90"]


def test_widths_are_those_of_the_main_path():
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


def test_interpreted_kernels_are_not_reported():
    with pytest.raises(RuntimeError, match="expected TRITON_INTERPRET to be unset"):
        kernel_table.collect()
