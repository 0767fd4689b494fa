"""Which GPU each rank of a run has, and whether that is a setting in which times mean something."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any

import torch

from fastcoll._measure import Control

__all__ = ["describe_gpus"]


def _own(device: torch.device) -> dict[str, Any]:
    """Returns this rank's placement, from torch.

    The host may be what NCCL_HOSTID has in its name's place: by that NCCL takes ranks on one GPU for ranks of several
    hosts, which shows that results are right and says nothing of times. The identity is what no other GPU of the host
    has, the index the number that this process gives it, and peers are the GPUs whose memory it can reach by itself.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    others = (other for other in range(count) if other != index)
    return {
        "host": os.environ.get("NCCL_HOSTID") or socket.gethostname(),
        "gpu": properties.name,
        "identity": str(getattr(properties, "uuid", index)),
        "index": index,
        "gpus": count,
        "peers": sum(torch.cuda.can_device_access_peer(index, other) for other in others),
    }


def describe_gpus(control: Control, device: torch.device) -> dict[str, Any]:
    """Gathers all ranks' placements; to be called by all of them.

    Returns:
        The hosts, how many ranks each has, the kinds of GPU, whether all GPUs of each host reach each other, and
        every rank's placement: for the record.

    Raises:
        ValueError: Ranks share a GPU; on all ranks.
    """
    ranks = control.all_gather(_own(device))
    users: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        users.setdefault((rank["host"], rank["identity"]), []).append(number)
    for (host, _), sharing in users.items():
        if len(sharing) > 1:
            raise ValueError(
                f"expected a GPU for each rank, and ranks {', '.join(map(str, sharing))} have the same one of {host}, "
                f"which NCCL refuses. Start as many ranks a host as it has GPUs: "
                f"torchrun --nproc-per-node {ranks[sharing[0]]['gpus']} -m fastcoll.bench ..."
            )
    return {
        "hosts": dict(Counter(rank["host"] for rank in ranks)),
        "kinds": dict(Counter(rank["gpu"] for rank in ranks)),
        "all_reach_each_other": all(rank["peers"] == rank["gpus"] - 1 for rank in ranks),
        "ranks": ranks,
    }
