"""The GPU of each rank of a run, and whether times of this placement are meaningful."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from fastcoll._measure import Control

__all__ = ["describe_gpus"]


def _own(device: torch.device) -> dict[str, Any]:
    """Returns this rank's placement, from torch.

    With different NCCL_HOSTIDs, NCCL treats ranks on one GPU as ranks of several hosts: then results can be verified,
    but times mean nothing. "identity" is unique among the GPUs of a host. "peers" counts the GPUs whose memory this one
    can access directly.
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


def describe_gpus(control: Control, device: torch.device) -> list[dict[str, Any]]:
    """Gathers all ranks' placements for the record; all ranks call this.

    Raises:
        ValueError: Ranks share a GPU; raised on all ranks.
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
    return ranks
