"""The environment variables: how they are read, and what is said of a bad one."""

import re

import pytest

import fastcoll
from fastcoll import env


def test_defaults():
    defaults = {one.name: one.default for one in env.VARIABLES}
    assert env.read({}) == env.read({"FASTCOLL_DEBUG": ""}) == defaults


def test_values_are_read_in_any_case():
    given = {"FASTCOLL_DEBUG": "info", "FASTCOLL_ISA": "AVX2", "FASTCOLL_SPIN_US": "50"}
    read = env.read(given)
    assert [read[name] for name in given] == ["INFO", "avx2", 50]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FASTCOLL_SPIN_US", "-2", "an integer from -1 to 1000000"),
        ("FASTCOLL_SPIN_US", "long", "an integer from -1 to 1000000"),
        ("FASTCOLL_RING_BYTES", "1", "an integer from 16384 to 1073741824"),
        ("FASTCOLL_SHARED_MEMORY", "tcp", "one of auto, off, require"),
        ("FASTCOLL_STORES", "wide", "one of auto, plain, streaming"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(name, value, expected):
    with pytest.raises(ValueError, match=f"{name}={value}: expected {expected}"):
        env.read({name: value})


def test_a_misspelt_name_is_found():
    assert env.unknown({"FASTCOLL_DEBG": "1", "FASTCOLL_DEBUG": "OFF", "PATH": ""}) == [
        "FASTCOLL_DEBG"
    ]


OF_GROUPS = {
    "digest",
    "shared_memory",
    "order",
    "network",
    "ring_bytes",
    "spin_us",
    "link_seconds",
    "shared_buckets",
    "threads",
}


def test_options_have_the_settings_of_a_group_with_their_defaults():
    rows = {one.name.removeprefix("FASTCOLL_").lower(): one for one in env.VARIABLES}
    options = fastcoll.Options()
    assert {name for name in rows if hasattr(options, name)} == {*OF_GROUPS, "tuning"}
    for name in OF_GROUPS:
        assert getattr(options, name) == rows[name].default


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("ring_bytes", 1, "expected an integer from 16384 to 1073741824"),
        ("spin_us", -2, "expected an integer from -1 to 1000000"),
        ("shared_memory", "tcp", "expected one of auto, off, require"),
    ],
)
def test_a_bad_option_is_named_with_what_is_expected(field, value, expected):
    given = re.escape(f"fastcoll.Options: {field}={value}: {expected}")
    with pytest.raises(ValueError, match=given):
        fastcoll.Options(**{field: value})
    options = fastcoll.Options()
    with pytest.raises(ValueError, match=given):
        setattr(options, field, value)


def test_an_option_that_is_none_is_named():
    with pytest.raises(TypeError, match="no field is named 'ringbytes'"):
        fastcoll.Options(ringbytes=1)
    with pytest.raises(TypeError):
        fastcoll.Options(ring_bytes="1")
