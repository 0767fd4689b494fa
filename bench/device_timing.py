"""Times work on a GPU, launched call by call or as a captured graph, and the host's time for launching."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fastcoll._measure import Call, Summary, in_turns, summarise

__all__ = ["DeviceTiming", "time_on_device", "time_on_host"]

_MILLISECONDS = 20.0  # of a turn on a device


@dataclass(frozen=True)
class DeviceTiming:
    """Times of one candidate in microseconds.

    Attributes:
        eager: Between events around a call, with gaps if the host launches too slowly.
        graph: Between events around a replay of the captured call, without gaps of the host.
    """

    eager: Summary
    graph: Summary


def time_on_device(
    candidates: Mapping[str, Call], stream: torch.cuda.Stream, rounds: int
) -> dict[str, DeviceTiming]:
    """Times candidates in turns; each call reads its data from memory, not from a cache.

    Args:
        candidates: Calls by name.
        stream: The current stream, on which all work is launched.
        rounds: Turns of each candidate and way.
    """
    from triton.testing import do_bench

    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for name, work in candidates.items():
        work()  # compiles, allocates
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        ways |= {(name, "eager"): work, (name, "graph"): graph.replay}
    samples: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for way in in_turns(list(ways), rounds):
        times = do_bench(ways[way], warmup=1, rep=_MILLISECONDS, return_mode="all")
        samples[way] += [1e3 * milliseconds for milliseconds in times]
    return {
        name: DeviceTiming(summarise(samples[name, "eager"]), summarise(samples[name, "graph"]))
        for name in candidates
    }


def time_on_host(
    calls: Mapping[str, Call], synchronize: Call, rounds: int, batch: int
) -> dict[str, Summary]:
    """Times how long the host issues calls, in turns; each batch begins with an empty queue and does not fill it.

    Args:
        calls: Calls by name.
        synchronize: Waits for the device.
        rounds: Batches of each call.
        batch: Calls of a batch; too few to fill the queue.

    Returns:
        Microseconds of host time for one call, a sample for each batch.
    """

    def issue(call: Call) -> float:
        synchronize()
        begin = time.perf_counter_ns()
        for _ in range(batch):
            call()
        return (time.perf_counter_ns() - begin) / 1e3 / batch

    for _ in range(2):  # warms up
        for call in calls.values():
            issue(call)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in in_turns(list(calls), rounds):
        samples[name].append(issue(calls[name]))
    synchronize()
    return {name: summarise(times) for name, times in samples.items()}
