"""The part of ``fastcoll tune`` that measures the network between hosts.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29500 -m fastcoll.tune --hosts

The first ranks of the first two hosts send a message there and back, a short one and a long one in turns. Half of a
round trip takes latency + bytes / bandwidth: Hockney, "The communication challenge for MPP", Parallel Computing 20
(1994). The selector between hosts needs latency times bandwidth (csrc/cpu/hosts/selector.hpp). Every host gets the same
table: that of the first host, with the new link.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fastcoll._group_backend import this_host
from fastcoll._measure import Control, Plan, measure, take_turn
from fastcoll.bench.peer import round_trip
from fastcoll.tune_search import show

__all__ = ["leaders_of", "measure_link"]

_SHORT, _LONG = 1, 4 << 20  # bytes


def leaders_of(control: Control) -> list[int]:
    """Returns the first rank of each host.

    Raises:
        SystemExit: There is one host.
    """
    hosts = control.all_gather(this_host())
    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    if len(leaders) == 1:
        raise SystemExit(
            f"fastcoll.tune: --hosts: expected ranks on several hosts, got {len(hosts)} on one. "
            "Start it by torchrun on each host (docs/guides/several-hosts.md)."
        )
    return leaders


def measure_link(control: Control, plan: Plan, ends: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """Measures the link between two hosts; all ranks call this.

    Args:
        control: Control of the run.
        plan: Number of calls.
        ends: Two ranks on two hosts.

    Returns:
        Latency times bandwidth in bytes, and the record of both.

    Raises:
        RuntimeError: The long message took no longer than the short one.
    """
    cpu = torch.device("cpu")
    messages = {size: torch.zeros(size, dtype=torch.uint8) for size in (_SHORT, _LONG)}
    turns = {
        size: partial(take_turn, round_trip(message, message, ends), cpu)
        for size, message in messages.items()
    }
    timings = measure(turns, control, plan, slowest_rank=True)
    short, long = (timings[size].time.median / 2e6 for size in (_SHORT, _LONG))
    if long <= short:
        raise RuntimeError(
            f"fastcoll.tune: expected {_LONG} bytes to take longer than {short * 1e6:.0f} us, as {_SHORT} does, got "
            f"{long * 1e6:.0f} us. Measure on idle hosts, with more --rounds."
        )
    bandwidth = (_LONG - _SHORT) / (long - short)
    link = round(short * bandwidth)
    remark = f"  ({short * 1e6:.0f} us, {bandwidth / 1e6:.0f} MB/s)"
    show(control, "link_bytes", link, remark)
    return link, {
        "ranks": list(ends),
        "latency_seconds": short,
        "bytes_per_second": bandwidth,
    }
