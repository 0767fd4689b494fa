"""A short soak; `make soak` is a long one. And that its verdict finds a leak."""

import pytest
from fault_list import plays
from soak_load import Sample, sampled
from soak_verdict import growths

SECONDS = 9.0


@plays(45)
@pytest.mark.full
def test_nothing_grows(jobs):
    job = jobs(3, sampled, SECONDS)
    for samples in job.hear_all(timeout=SECONDS + 40.0).values():
        assert samples[-1].rounds > 20
        assert growths(samples) == []
    job.ended_well()


def steady(count=90, **leaks):
    """Samples of a process that leaks so much a second."""
    start = {
        "allocated": 1e8,
        "resident": 2e8,
        "shared": 4e6,
        "descriptors": 20,
        "threads": 5,
        "mappings": 3,
    }
    return [
        Sample(
            at=float(i),
            rounds=10 * i,
            **{
                name: int(value + leaks.get(name, 0.0) * i + (value * 0.01 if i % 7 == 0 else 0))
                for name, value in start.items()
            },
        )
        for i in range(count)
    ]


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
        ("resident", 400_000.0),
    ],
)
def test_a_leak_is_found(name, each_second):
    (found,) = growths(steady(**{name: each_second}))
    assert found.startswith(name)


def test_a_short_run_finds_a_leak_of_every_round():
    assert growths(steady(13, threads=0.1, resident=1e6)) == []
    found = growths(steady(13, threads=2.0, resident=2e7, descriptors=1.0))
    assert [text.split()[0] for text in found] == ["descriptors", "threads", "resident"]


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="let it run longer"):
        growths(steady(5))
