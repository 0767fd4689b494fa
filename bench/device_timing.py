"""Times work on a GPU, launched call by call or as a captured graph, and the host's time for launching."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from fastcoll._measure import Call, Summary, in_turns, summarise

__all__ = ["captured", "time_on_device", "time_on_host"]

_MILLISECONDS = 20.0  # of a turn on a device


def captured(call: Call, repeats: int = 1, stream: torch.cuda.Stream | None = None) -> Call:
    """Returns the replay of a graph of some calls; the first call, which compiles and allocates, is not captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    return graph.replay


def time_on_device(
    candidates: Mapping[str, Call], stream: torch.cuda.Stream, rounds: int
) -> dict[str, dict[str, Summary]]:
    """Times candidates in turns; each call reads its data from memory, not from a cache.

    Args:
        candidates: Calls by name.
        stream: The current stream, on which all work is launched.
        rounds: Turns of each candidate and way.

    Returns:
        Microseconds by name and way. "eager" is between events around a call, with gaps if the host launches too
        slowly; "graph" around a replay of the captured call, without gaps of the host.
    """
    from triton.testing import do_bench

    def take(work: Call) -> list[float]:
        times = do_bench(work, warmup=1, rep=_MILLISECONDS, return_mode="all")
        return [1e3 * milliseconds for milliseconds in times]

    turns = {}
    for name, work in candidates.items():
        turns[name, "graph"] = partial(take, captured(work, stream=stream))
        turns[name, "eager"] = partial(take, work)
    found = {way: summarise(times) for way, times in in_turns(turns, rounds).items()}
    return {name: {way: found[name, way] for way in ("eager", "graph")} for name in candidates}


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

    def issue(call: Call) -> list[float]:
        synchronize()
        begin = time.perf_counter_ns()
        for _ in range(batch):
            call()
        return [(time.perf_counter_ns() - begin) / 1e3 / batch]

    turns = {name: partial(issue, call) for name, call in calls.items()}
    in_turns(turns, 2)  # warms up
    samples = in_turns(turns, rounds)
    synchronize()
    return {name: summarise(times) for name, times in samples.items()}
