"""A soak: a mixed load, in which nothing may grow. And that its verdict finds a leak.

SOAK=600 .ci/run soak           for so many seconds; FASTCOLL_TEST_SOAK_JSON names a file for the samples
"""

import dataclasses
import os
from pathlib import Path

import pytest
from fault_list import plays
from soak_load import Sample, sampled
from soak_verdict import THRESHOLDS, growths

from fastcoll.bench.conditions import describe_run
from fastcoll.bench.record import write_record

SECONDS = float(os.environ.get("FASTCOLL_TEST_SOAK", "9"))
RECORD = os.environ.get("FASTCOLL_TEST_SOAK_JSON")


@plays(45)
@pytest.mark.full
def test_nothing_grows(jobs):
    answers = jobs(3, sampled, SECONDS).hear_all(timeout=SECONDS + 60.0)
    for rank, samples in answers.items():
        first, last = samples[len(samples) // 4], samples[-1]
        print(f"rank {rank}: {last.rounds} rounds in {last.at:.0f} s, {len(samples)} samples")
        for name in THRESHOLDS:
            values = getattr(first, name), getattr(last, name)
            print("  {:12} {:>12} after the warm-up, {:>12} at the end".format(name, *values))
    grown = {rank: growths(samples) for rank, samples in answers.items()}
    if RECORD:
        record = describe_run(f"SOAK={SECONDS:g} .ci/run soak") | {
            "thresholds": THRESHOLDS,
            "grown": grown,
            "cases": [
                {"rank": rank, **dataclasses.asdict(sample)}
                for rank, samples in answers.items()
                for sample in samples[:: max(1, len(samples) // 60)]
            ],
        }
        write_record(Path(RECORD), record)
    assert all(samples[-1].rounds > 20 for samples in answers.values())
    assert grown == {rank: [] for rank in answers}


def steady(count=90, **leaks):
    """Samples of a process that leaks so much a second."""
    start = {"allocated": 1e8, "shared": 4e6}
    start |= {"descriptors": 20, "threads": 5, "mappings": 3}

    def held(i):
        burst = 0.01 if i % 7 == 0 else 0.0
        return {n: int(v + leaks.get(n, 0.0) * i + v * burst) for n, v in start.items()}

    return [Sample(at=float(i), rounds=10 * i, **held(i)) for i in range(count)]


def test_bursts_are_no_growth():
    assert growths(steady()) == []


@pytest.mark.parametrize(
    ("name", "each_second"),
    [
        ("descriptors", 0.1),
        ("threads", 0.1),
        ("mappings", 0.1),
        ("shared", 200_000.0),
        ("allocated", 150_000.0),
    ],
)
def test_a_leak_is_found(name, each_second):
    (found,) = growths(steady(**{name: each_second}))
    assert found.startswith(name)


def test_a_short_run_finds_a_leak_of_every_round():
    assert growths(steady(13, threads=0.1, allocated=1e6)) == []
    found = growths(steady(13, threads=2.0, allocated=2e7, descriptors=1.0))
    assert [text.split()[0] for text in found] == ["descriptors", "threads", "allocated"]


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="let it run longer"):
        growths(steady(5))
