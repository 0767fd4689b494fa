"""What a training prints is read right, and compared with gloo's."""

import json

import pytest
from client_record import bound, compared, parsed

RESULT = {
    "losses": ["0x1.0p+1", "0x1.0p+0"],
    "step_seconds": 0.25,
    "steps": 2,
    "ranks": 2,
    "served_by": ["fastcoll"],
    "ended": "well",
    "versions": {"torch": "2.13.0"},
}


def printed(**changed):
    return f"a warning\nCLIENT {json.dumps({**RESULT, **changed})}\nanother\n"


def runs(ours, theirs, ranks=2):
    of = {"fastcoll": (ours, 0.25), "gloo": (theirs, 0.5)}
    some = {
        name: [{**RESULT, "losses": losses, "step_seconds": seconds}] * 3
        for name, (losses, seconds) in of.items()
    }
    return compared(some, ranks)


def test_a_result_is_read_between_other_lines():
    assert parsed(printed(), "fastcoll", 2) == RESULT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "expected one line"),
        (printed() + printed(), "got 2"),
        (printed(served_by=["gloo"]), "expected groups served by fastcoll, got .'gloo'"),
        (printed(served_by=["fastcoll", "gloo"]), "expected groups served by fastcoll"),
        (printed(ranks=1), "expected 2 ranks, got 1"),
        ('CLIENT {"losses": []}', "got none of step_seconds"),
    ],
)
def test_what_is_no_result_is_an_error(text, message):
    with pytest.raises(RuntimeError, match=message):
        parsed(text, "fastcoll", 2)


def test_medians_ratio_and_equal_bits():
    case = runs(RESULT["losses"], RESULT["losses"])
    assert case["ratio"] == 2.0
    assert (case["same_bits"], case["difference"], case["agrees"]) == (True, 0.0, True)


def test_a_last_bit_is_a_difference_with_two_ranks_and_within_the_bound_with_four():
    last = [RESULT["losses"][0], "0x1.000002p+0"]
    assert not runs(last, RESULT["losses"])["agrees"]
    case = runs(last, RESULT["losses"], ranks=4)
    assert case["agrees"] and not case["same_bits"]
    assert case["difference"] == 2.0**-23 <= bound(4)
    assert not runs(["0x1.0p+1", "0x1.01p+0"], RESULT["losses"], ranks=4)["agrees"]


def test_a_nan_is_no_agreement():
    assert not runs(["0x1.0p+1", "nan"], RESULT["losses"], ranks=4)["agrees"]
