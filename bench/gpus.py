"""The GPU of each rank of a run: times mean nothing if ranks share one."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from fastcoll._measure import Control

__all__ = ["describe_gpus"]


def describe_gpus(control: Control, device: torch.device) -> list[dict[str, Any]]:
    """Gathers all ranks' placements for the record; all ranks call this.

    With different NCCL_HOSTIDs, NCCL treats ranks on one GPU as ranks of several hosts: then results can be verified,
    but times mean nothing. "peers" counts the GPUs whose memory a GPU can access directly.

    Raises:
        ValueError: Ranks share a GPU; raised on all ranks.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(index)
    others = (other for other in range(count) if other != index)
    own = {
        "host": os.environ.get("NCCL_HOSTID") or socket.gethostname(),
        "gpu": properties.name,
        "identity": str(getattr(properties, "uuid", index)),
        "index": index,
        "gpus": count,
        "peers": sum(torch.cuda.can_device_access_peer(index, other) for other in others),
    }
    ranks = control.all_gather(own)
    places = [(rank["host"], rank["identity"]) for rank in ranks]
    for place in dict.fromkeys(places):
        sharing = [str(number) for number, other in enumerate(places) if other == place]
        if len(sharing) > 1:
            raise ValueError(
                f"expected a GPU for each rank, and ranks {', '.join(sharing)} have the same one of {place[0]}, "
                f"which NCCL refuses. Start as many ranks a host as it has GPUs: "
                f"torchrun --nproc-per-node {ranks[int(sharing[0])]['gpus']} -m fastcoll.bench ..."
            )
    return ranks
