"""Times work on a GPU: as it is launched call by call, and as a captured graph, without the host in between."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fastcoll._measure import Summary, summarise

__all__ = ["DeviceTiming", "host_microseconds", "time_on_device"]

Work = Callable[[], object]


@dataclass(frozen=True)
class DeviceTiming:
    """Times of one candidate in microseconds.

    Attributes:
        eager: Between events around a call, with the gaps of a host that launches too slowly.
        graph: Between events around a replay of the captured call; None where it could not be captured.
    """

    eager: Summary
    graph: Summary | None


def _capture(works: Sequence[Work], stream: torch.cuda.Stream) -> list[torch.cuda.CUDAGraph]:
    graphs = []
    for work in works:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graphs.append(graph)
    return graphs


def time_on_device(
    candidates: Mapping[str, Sequence[Work]], stream: torch.cuda.Stream, rounds: int
) -> dict[str, DeviceTiming]:
    """Times candidates in turns; to be called with `stream` current.

    Args:
        candidates: By name, for each the same work on several sets of buffers: each call takes the next
            set, so that none finds its data in the cache.
        stream: On which all is launched.
        rounds: Timed calls of each candidate and way.
    """
    ways: dict[tuple[str, str], Sequence[Work]] = {}
    for name, works in candidates.items():
        for work in works:
            work()  # compiles, allocates
        stream.synchronize()
        ways[name, "eager"] = works
        ways[name, "graph"] = [graph.replay for graph in _capture(works, stream)]
    samples: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    keys = list(ways)
    for turn in range(-2, rounds):
        first = turn % len(keys)
        for key in keys[first:] + keys[:first]:
            works = ways[key]
            works[
                (turn - 1) % len(works)
            ]()  # the event before then waits for running work, not for the host
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(stream)
            works[turn % len(works)]()
            end.record(stream)
            end.synchronize()
            if turn >= 0:
                samples[key].append(1e3 * begin.elapsed_time(end))
    return {
        name: DeviceTiming(summarise(samples[name, "eager"]), summarise(samples[name, "graph"]))
        for name in candidates
    }


def host_microseconds(work: Work, stream: torch.cuda.Stream, rounds: int = 50) -> float:
    """Returns the median host time of a call in microseconds, from `rounds` batches of 100 calls.

    The queue is empty when a batch begins and never full, so that no call waits for the device.
    """
    for _ in range(20):
        work()
    samples = []
    for _ in range(rounds):
        stream.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(100):
            work()
        samples.append((time.perf_counter_ns() - begin) / 1e5)
    stream.synchronize()
    return statistics.median(samples)
