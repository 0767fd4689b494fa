"""The table that `.ci/run faults` prints: how what came of a test is named, and that each fault has a test."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_list import FAULTS
from fault_rank import Rank
from fault_table import verdict
from in_time import TooSlow
from ranks import RanksFailed

TESTS = Path(__file__).parents[1]


def test_each_fault_has_a_test():
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    marked = {int(n) for text in texts for n in re.findall(r"plays\((\d+)\)", text)}
    assert marked == FAULTS.keys()


@pytest.mark.parametrize(
    ("when", "error", "said"),
    [
        ("call", None, "as wanted"),
        ("setup", pytest.skip.Exception("needs root"), "not played"),
        ("call", TooSlow("took 2 s"), "too slow"),
        ("teardown", AssertionError("left behind"), "left behind"),
        ("call", RanksFailed("rank 1 says nothing", "silent"), "hang"),
        ("call", RanksFailed("rank 1 ended with -6", "ended"), "crash"),
        (
            "call",
            RanksFailed("AssertionError: a wrong result was returned", "raised"),
            "wrong result",
        ),
        ("call", AssertionError("no error: success was reported"), "wrong result"),
        ("call", RanksFailed("RuntimeError: no", "raised"), "not as wanted"),
    ],
)
def test_verdicts(when, error, said):
    caught = error and SimpleNamespace(value=error)
    assert verdict(SimpleNamespace(when=when, excinfo=caught)) == said


def cannot_inject(rank: Rank):
    if rank.rank == 1:
        pytest.skip("needs root: the machine forbids it")
    rank.hear()


def test_a_fault_that_a_rank_cannot_inject_skips_the_test(jobs):
    """Whichever rank is heard first: the log of the one that cannot comes with the failure of its peer."""
    job = jobs(2, cannot_inject)
    assert job.end(1) == 1
    with pytest.raises(pytest.skip.Exception, match=r"^needs root: the machine forbids it$"):
        job.hear(0, timeout=0.1)
