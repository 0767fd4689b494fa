"""Whatever lies where dumps are looked for: a report or one clear sentence, and never a traceback."""

import io
import json
import pickle
import pickletools
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace_reading import entry, raw

from fastcoll.trace.__main__ import main

EXAMPLES = 50 if settings.default.derandomize else 200
SETTINGS = settings(max_examples=EXAMPLES)


def good() -> dict[str, Any]:
    """What rank 0 of two would write: collectives, a failure with its stack, and a message."""
    frames = [{"name": "step", "filename": "/train.py", "line": 7}]
    failed = entry(2, state="failed", error="a fault", root=1) | {"frames": frames}
    message = entry(1, "1", lane="message", sends=True, to=1, tag=3, **{"from": 0})
    return raw(0, [entry(1), failed, message], 2)


def report(content: bytes) -> tuple[int, str]:
    """Return the exit status and what is printed of a job of two ranks, one of which wrote this."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "t_0").write_bytes(content)
        other = good()
        other["fastcoll"]["rank"] = 1
        Path(folder, "t_1").write_bytes(pickle.dumps(other))
        with redirect_stdout(out), redirect_stderr(err):
            status = main([f"{folder}/t_"])
        if status == 2:
            said = err.getvalue()
            assert said.startswith(f"fastcoll.trace: {folder}/t_0: "), said
            assert out.getvalue() == "" and len(said) < 1000
            return status, said
        with redirect_stdout(again := io.StringIO()):
            assert main([f"{folder}/t_", "--json"]) == status
        json.loads(again.getvalue())
    assert status in (0, 1) and err.getvalue() == ""
    return status, out.getvalue()


def test_what_is_altered_below_is_read():
    assert report(pickle.dumps(good()))[0] == 1  # one of its calls failed


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes(content):
    assert report(content)[0] == 2


OPCODES = [code.code.encode("latin-1") for code in pickletools.opcodes]
OPERATION = st.tuples(st.sampled_from(OPCODES), st.sampled_from([b"", b"\n", b"\1", b"\xff" * 8]))


@SETTINGS
@given(st.lists(OPERATION, max_size=30))
def test_any_operations_of_a_pickle(operations):
    assert report(b"\x80\x04" + b"".join(map(b"".join, operations)))[0] == 2


@SETTINGS
@given(st.integers(0), st.integers(0), st.binary(max_size=6))
def test_bytes_that_are_replaced(start, length, by):
    content = pickle.dumps(good())
    at = start % len(content)
    report(content[:at] + by + content[at + length % 8 :])


@SETTINGS
@given(st.integers(0))
def test_a_dump_that_is_cut_off(length):
    content = pickle.dumps(good())
    status, said = report(content[: length % len(content)])
    assert status == 2 and "not a dump" in said


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1 << 62, 1 << 63, 1 << 64, 1 << 4000]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["[0, 1", "[" * 5000, "[0," + "9" * 400 + "]", "\x1b[2J", "\ud800", "[[0]]"]),
    st.binary(max_size=4),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container within, with each of its keys or indices."""
    found = []
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key])
    return found


@settings(SETTINGS, max_examples=3 * EXAMPLES)
@given(st.data())
def test_any_value_in_any_place(data):
    raw = good()
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(raw)))
        if isinstance(container, dict) and data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = data.draw(ANYTHING)
    _, said = report(pickle.dumps(raw))
    assert all(c.isprintable() or c in "\n\t" for c in said), "a terminal would obey it"


@pytest.mark.parametrize("op", [b"r\xff\xff\xff\x7f", b"p9999999999\n"])
def test_an_index_in_a_file_reserves_no_memory(op):
    """A memo of two thousand million entries would take this process with it."""
    status, _ = report(b"\x80\x02N" + op + b".")
    assert status == 2


def test_numbers_far_apart_are_not_counted_through():
    raw = good()
    raw["entries"][1]["fastcoll"]["seq"] = 1 << 60
    assert report(pickle.dumps(raw))[0] == 1


def test_lists_that_hold_each_other():
    """Of a few hundred bytes, but 10**30 numbers to whoever walks all."""
    shape: Any = [1] * 10
    for _ in range(30):
        shape = [shape] * 10
    raw = good()
    raw["entries"][0]["input_sizes"] = shape
    status, said = report(pickle.dumps(raw))
    assert status == 2 and "input_sizes[0][0]: expected a number" in said
