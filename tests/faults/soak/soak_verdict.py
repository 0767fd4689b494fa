"""Whether what the ranks sampled grows.

What leaked is there in the quietest moment too, while tensors in use and idle threads come and go. So the samples
behind a warm-up of a quarter of the time, in which buffers and thread pools get their size, are cut into blocks. A
straight line is fitted to the blocks' minima (Theil and Sen: the median of all slopes, which single ones do not
move). What it says was gained over the whole run is held against a threshold:

* descriptors, threads, mappings: half of one. A leak of one a minute is 5 in five minutes.
* shared memory: 4 MiB, two rings: groups that were just destroyed rest for a second before their memory is
  given back, so that single samples differ by about as much, but not their trend.
* allocated memory: 8 MiB; one lost message of the load's usual sizes at each round would be many times that.

In less than a minute the warm-up is not over: threads of the pool, of which there are a few, come with the first
works and go after two idle seconds. Such a run finds leaks of each round only: the minimum of its last third may be
three threads and 32 MiB above that of the first behind the warm-up, because a round's tensors are up to 14 MB.
"""

import itertools
import statistics
from collections.abc import Sequence

from soak_load import Sample

WARM_UP = 0.25

MIN_BLOCK, BLOCKS = 3, 20

SHORT = 60.0
"""Seconds below which a run is held to LOOSE."""

MIB = float(1 << 20)

THRESHOLDS = {
    "descriptors": 0.5,
    "threads": 0.5,
    "mappings": 0.5,
    "shared": 4 * MIB,
    "allocated": 8 * MIB,
}
"""Growth over the run that counts as none, by attribute of Sample."""

LOOSE = THRESHOLDS | {"threads": 3.0, "allocated": 32 * MIB}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points (Theil 1950, Sen 1968)."""
    slopes = [
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x2 > x1
    ]
    return statistics.median(slopes) if slopes else 0.0


def _floor(name: str, samples: Sequence[Sample]) -> float:
    return min(float(getattr(s, name)) for s in samples)


def growths(samples: Sequence[Sample]) -> list[str]:
    """Return what grows, as text; none if nothing does.

    Raises:
        ValueError: there are too few samples to tell.
    """
    if len(samples) < 8:
        raise ValueError(f"expected at least 8 samples, got {len(samples)}: let it run longer")
    whole = samples[-1].at - samples[0].at
    warm = [s for s in samples if s.at >= samples[0].at + WARM_UP * whole]
    size = max(MIN_BLOCK, -(-len(warm) // BLOCKS))
    blocks = [warm[i : i + size] for i in range(0, len(warm) - MIN_BLOCK + 1, size)]
    third = max(1, len(warm) // 3)
    found = []
    for name, threshold in (LOOSE if whole < SHORT else THRESHOLDS).items():
        if whole < SHORT:
            grown = _floor(name, warm[-third:]) - _floor(name, warm[:third])
        else:
            points = [(block[0].at, _floor(name, block)) for block in blocks]
            grown = slope(points) * whole
        if grown > threshold:
            found.append(
                f"{name} grow by {grown:.6g} in {whole:.0f} s, from {_floor(name, warm[:third]):.9g}"
            )
    return found
