"""Which GPU each rank of a run has, and whether that is a setting in which times mean something."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastcoll._measure import Control

__all__ = ["Placement", "describe_gpus", "own_placement", "problem_of"]


@dataclass(frozen=True)
class Placement:
    """Where a rank runs.

    Attributes:
        host: Its name, or what NCCL_HOSTID says in its place: by that NCCL takes ranks on one GPU for ranks of
            several hosts, which shows that results are right and says nothing of times.
        gpu: The name of its GPU.
        identity: What no other GPU of the host has.
        index: As this process numbers it.
        gpus: How many of them this process sees.
        peers: Of these, whose memory the rank's GPU can reach by itself.
    """

    host: str
    gpu: str
    identity: str
    index: int
    gpus: int
    peers: int


def own_placement(device: torch.device) -> Placement:
    """Returns this rank's, from torch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    reachable = [
        other
        for other in range(count)
        if other != index and torch.cuda.can_device_access_peer(index, other)
    ]
    identity = str(getattr(properties, "uuid", index))
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return Placement(host, properties.name, identity, index, count, len(reachable))


def problem_of(ranks: Sequence[Placement]) -> str:
    """Returns what is wrong with the ranks' GPUs, or "": each must have one of its own."""
    users = Counter((rank.host, rank.identity) for rank in ranks)
    for (host, identity), count in users.items():
        if count > 1:
            sharing = [
                number
                for number, rank in enumerate(ranks)
                if (rank.host, rank.identity) == (host, identity)
            ]
            return (
                f"expected a GPU for each rank, and ranks {', '.join(map(str, sharing))} have the same one of {host}, "
                f"which NCCL refuses. Start as many ranks a host as it has GPUs: "
                f"torchrun --nproc-per-node {ranks[sharing[0]].gpus} -m fastcoll.bench ..."
            )
    return ""


def describe_gpus(control: Control, device: torch.device) -> dict[str, Any]:
    """Gathers all ranks' placements; to be called by all of them.

    Returns:
        The hosts, how many ranks each has, the kinds of GPU, whether all GPUs of each host reach each other, and
        every rank's placement: for the record.

    Raises:
        ValueError: Ranks share a GPU; on all ranks.
    """
    ranks: list[Placement] = [
        Placement(**one) for one in control.all_gather(asdict(own_placement(device)))
    ]
    if problem := problem_of(ranks):
        raise ValueError(problem)
    return {
        "hosts": dict(Counter(rank.host for rank in ranks)),
        "kinds": dict(Counter(rank.gpu for rank in ranks)),
        "all_reach_each_other": all(rank.peers == rank.gpus - 1 for rank in ranks),
        "ranks": [asdict(rank) for rank in ranks],
    }
