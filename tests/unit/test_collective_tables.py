"""Each collective of csrc/base/collectives.def is in each table that must have it.

A file that goes through REDUCING and MOVING of collective_cases.py, or through the benchmark's COLLECTIVES, needs no
row here.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINED = (ROOT / "csrc/base/collectives.def").read_text()
COLLECTIVES = dict(re.findall(r'^COLLECTIVE\((\w+), +"(\w+)"\)', DEFINED, re.MULTILINE))

RING = dict.fromkeys(("send", "recv"), "`ring` sends and receives")
MESSAGES = dict.fromkeys(("send", "recv"), "a message is no collective; its tests are its own")
SENDRECV = dict.fromkeys(("send", "recv"), "`sendrecv` sends and receives")
OPERATORS = ("broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv")
NO_OPERATOR = dict.fromkeys(OPERATORS, "torch.ops.fastcoll has no such operator")

TABLES = [
    ("tests/collective_cases.py", "REDUCING MOVING", '"{0}"', {"barrier": "has no tensors"} | RING),
    ("tests/collective_doors.py", "OPERATORS", '"{0}"', NO_OPERATOR),
    ("tests/faults/rank_calls.py", "", r"dist\.{0}\b|def {0}\(", {}),
    ("tests/faults/test_mismatch.py", "", r"dist\.i?{0}\b|def {0}\(|\b{0},\n", {}),
    ("tests/faults/trace_scenarios.py", "every_kind", r"dist\.{0}\(", MESSAGES),
    ("tests/device/engine_cases.py", "", r'Case\("{0}"|dist\.i?{0}\(', {}),
    (
        "tests/cpp/stress_job.cpp",
        "",
        "case Collective::{1}:",
        {"barrier": "has no values"} | MESSAGES,
    ),
    ("bench/collectives.py", "_ALL", r'Collective\("{0}"', SENDRECV),
    ("bench/peer.py", "bind", '"{0}":', SENDRECV),
    ("bench/peer.py", "bind_direct", '"{0}":', SENDRECV),
    ("bench/peer.py", "bind_operator", '"{0}":', NO_OPERATOR),
    ("bench/mpi.py", "bind", '"{0}":', SENDRECV),
]
"""File, definitions in it (all of it without one), a row by name {0} and enumerator {1}, and what needs no row: why."""


def definitions(path: str, names: str) -> str:
    """Return the source of the functions and variables of these names, up to the next line as far left."""
    text = (ROOT / path).read_text()
    block = r"^( *)(?:def )?{}\b.*\n(?:\1[ \])}}].*\n|\n)*"
    found = [re.search(block.format(name), text, re.MULTILINE) for name in names.split()]
    assert None not in found, f"{names} are not all in {path}"
    return "".join(match[0] for match in found) if names else text


@pytest.mark.parametrize(("path", "names", "row", "without"), TABLES)
def test_each_collective_is_in_each_table(path, names, row, without):
    text = definitions(path, names)
    rows = {name: re.search(row.format(name, camel), text) for camel, name in COLLECTIVES.items()}
    missing = {name for name, found in rows.items() if not found}
    needed, listed = sorted(missing - without.keys()), sorted(without.keys() - missing)
    assert not needed, f"{path} has no row of {needed}{names and f' in {names}'}"
    assert not listed, f"{path} has rows of {listed}, which are listed as exceptions"
