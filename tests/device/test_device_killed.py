"""The measurement of a killed rank on one GPU (tests/gpu), as far as it goes without one."""

from killed import killed
from suite_rules import bound


def test_the_error_names_the_killed_rank(nccl_world):
    answers = nccl_world(2).run(killed, "fastcoll", "recording:0", 2.0, dying=[1])
    text, seconds = answers[0]
    assert "rank 1" in text and seconds < bound(5), answers
