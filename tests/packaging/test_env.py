"""The environment variables: how they are read, and what is said of a bad one."""

import pytest

from fastcoll import env


def test_defaults() -> None:
    defaults = {one.name: one.default for one in env.VARIABLES}
    assert env.read({}) == env.read({"FASTCOLL_DEBUG": ""}) == defaults


def test_values_are_read_in_any_case() -> None:
    given = {"FASTCOLL_DEBUG": "info", "FASTCOLL_ISA": "AVX2", "FASTCOLL_SPIN_US": "50"}
    read = env.read(given)
    assert [read[name] for name in given] == ["INFO", "avx2", 50]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FASTCOLL_SPIN_US", "-2", "an integer from -1 to 1000000"),
        ("FASTCOLL_SPIN_US", "long", "an integer from -1 to 1000000"),
        ("FASTCOLL_RING_BYTES", "1", "an integer from 16384 to 1073741824"),
        ("FASTCOLL_TRANSPORT", "tcp", "one of auto, shm, gloo"),
        ("FASTCOLL_STORES", "wide", "one of auto, plain, streaming"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected {expected}"):
        env.read({name: value})


def test_a_misspelt_name_is_found() -> None:
    assert env.unknown({"FASTCOLL_DEBG": "1", "FASTCOLL_DEBUG": "OFF", "PATH": ""}) == [
        "FASTCOLL_DEBG"
    ]
