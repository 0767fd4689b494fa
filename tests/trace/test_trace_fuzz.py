"""Whatever lies where dumps are looked for: a report or one clear sentence, and never a traceback."""

import io
import json
import re
import struct
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_bytes import KNOWN, TEXTS, dump

from fastcoll.trace.__main__ import main
from fastcoll.trace.memory import _FIRST_SLOT, _HEADER, _RECORD, _SLOT

SETTINGS = settings(max_examples=150 if settings.default.derandomize else 600)
SENTENCES = "(not a dump of fastcoll.trace|another file is of|expected a trace of layout).{9,500}"
GOOD = dump()


def report(content: bytes) -> tuple[int, str]:
    """Return the exit status and what is printed of a job of two ranks, one of which wrote this."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "t_0").write_bytes(content)
        for name, rank in (("t_1", 1), ("good_0", 0), ("good_1", 1)):
            Path(folder, name).write_bytes(dump(rank=rank))
        with redirect_stdout(out), redirect_stderr(err):
            status = main([f"{folder}/t_"])
        said = out.getvalue() + err.getvalue()
        assert all(c.isprintable() or c in "\n\t" for c in said), "a terminal would obey it"
        if status == 2:  # of two files of one rank, the second is named
            assert re.fullmatch(rf"fastcoll\.trace: {folder}/t_[01]: {SENTENCES}\n", said), said
            return status, said
        with redirect_stdout(again := io.StringIO()):
            assert main([f"{folder}/t_", "--json", "--flight-recorder", f"{folder}/f"]) == status
        json.loads(again.getvalue())
        for other, most in ((f"{folder}/t_", 0), (f"{folder}/good_", 1)):
            with redirect_stdout(again := io.StringIO()):
                assert main(["--against", f"{folder}/t_", other]) <= most
            assert all(c.isprintable() or c in "\n\t" for c in again.getvalue())
    assert status in (0, 1) and err.getvalue() == ""
    return status, said


@pytest.mark.parametrize(
    "line", [b"step\t/train.py\t7", b"\x1bt\xffp\t/train.py\t7", b"step\t/train.py\t-"]
)
def test_what_is_altered_below_is_read(line):
    status, said = report(GOOD.replace(b"step\t/train.py\t7", line))
    assert status == 1 and "/train.py:9 in main" in said  # one of its calls failed


@SETTINGS
@given(
    st.sampled_from([0, 12, _FIRST_SLOT, TEXTS]), st.integers(0), st.integers(0, 16), st.binary()
)
def test_bytes_that_are_replaced(part, start, length, by):
    """Or that follow, as in any file; or that are missing, as in one that is cut off."""
    at = part + start % (len(GOOD) - part if part > 12 else _HEADER.size)
    end = at + length if length < 9 else len(GOOD)
    content = GOOD[:at] + by + GOOD[end:]
    status, _ = report(content)
    assert status == 2 or end < len(GOOD) or content.startswith(GOOD)


FORMS = {0: _HEADER.format} | {
    _FIRST_SLOT + number * _SLOT: f"<Q{_RECORD.format[1:]}QQQQQQQ" for number in (2, 3)
}
FIELDS = [
    (begin + struct.calcsize(form[: field.start()]), struct.calcsize(f"<{field[0]}"))
    for begin, form in FORMS.items()
    for field in re.finditer(r"\d*[\w?]", form)
]
"""Place and bytes of each field."""
EDGES = [0, 5, 255, 1 << 60, (1 << 64) - 1]
NUMBERS = st.sampled_from(EDGES) | st.integers(0, 50) | st.integers(0, (1 << 64) - 1)


def with_numbers(*changes: tuple[tuple[int, int], int]) -> bytes:
    content = bytearray(GOOD)
    for (at, size), number in changes:
        by = struct.pack("<Q", number)[:size]
        content[at : at + len(by)] = by
    return bytes(content)


def test_each_field_of_the_header_and_of_records_at_its_edges():
    for change in product(FIELDS, EDGES):
        report(with_numbers(change))


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(FIELDS), NUMBERS), min_size=2, max_size=4))
def test_any_numbers_in_the_header_and_in_records(changes):
    report(with_numbers(*changes))


RAW = ["[", '{"":', "9", "1e999", "", "\0", '"\\ud800"', '"\\u001b[2J"', '{"1": 0, "01": []}']
SCALARS = st.one_of(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9),
    st.integers(-1, 9) | st.sampled_from([1 << 31, 1 << 63, 1 << 4000]),
    st.just("RAW"),
)
KEYS = st.sampled_from(["", "0", "01", "-1", "\u0663", "name", "ranks"])
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=6
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container within, with each of its keys or indices."""
    found = []
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key])
    return found


def with_values(*changes: tuple[int, Any]) -> str:
    whole = [deepcopy(KNOWN)]
    for place, value in changes:
        found = places(whole)
        container, key = found[place % len(found)]
        container[key] = value
    return json.dumps(whole[0])


def test_each_place_of_the_json_at_its_edges():
    edges = (None, -1, 5, 1 << 60, "\x1b[2J", [], {"": 0})
    for change in product(range(len(places([KNOWN]))), edges):
        report(dump(text=with_values(change)))


CHANGES = st.lists(st.tuples(st.integers(0, 50), ANYTHING), min_size=1, max_size=3)


@SETTINGS
@given(CHANGES, st.sampled_from(RAW), st.sampled_from([1, 5000]))
def test_any_values_in_the_json(changes, raw, times):
    report(dump(text=with_values(*changes).replace('"RAW"', times * raw)))
