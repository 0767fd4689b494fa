"""What the ranks of a group must know of each other before they map memory, and what rank 0 decides from it.

Each rank posts its record: host, device, Triton, tuning table and settings. Rank 0's verdict is equal for all:
whether settings differ, and why the ranks do not map each other's memory, if they do not.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastcoll.cuda.errors import names_of
from fastcoll.cuda.mapping import TorchSymmetricMemory
from fastcoll.cuda.thresholds import Thresholds
from fastcoll.kernels.peers import MAX_RANKS, PeerLayout

__all__ = [
    "REGION_SIZES",
    "MappingRequest",
    "RegionSizes",
    "Verdict",
    "decide",
    "reason_against",
    "record_of",
]


@dataclass(frozen=True)
class RegionSizes(PeerLayout):
    """Sizes of a rank's region: the layout for kernels, with as many channels as there may be, and a bucket.

    With staging of 128 KiB and slots of 64 KiB an H200 is 10 to 11 % faster than with half of each
    (bench/results/kernels_cuda.jsonl), and larger ones gain little more.

    Attributes:
        bucket_bytes: Room for a list's bucket and its sums of squares; DDP's buckets have 25 MiB.
    """

    channels: int = 32
    stage_bytes: int = 128 << 10
    slots: int = 4
    slot_bytes: int = 64 << 10
    bucket_bytes: int = 32 << 20


REGION_SIZES = RegionSizes()
"""Sizes of all regions of this process: 48 MiB each, one region for each group and device."""


@dataclass(frozen=True)
class MappingRequest:
    """A rank's settings.

    Attributes:
        algorithm: FASTCOLL_ALGO, which must be the same on all ranks.
        thresholds: From the tuning table; all ranks use those of rank 0.
        sizes: Sizes of the regions, the same on all ranks.
        order: FASTCOLL_ORDER, the same on all ranks.
    """

    algorithm: str
    thresholds: Thresholds
    sizes: RegionSizes
    order: str = "any"


def record_of(
    mapper: TorchSymmetricMemory | None,
    device: torch.device,
    request: MappingRequest,
    channels: int,
) -> dict[str, Any]:
    """Returns what this rank has; a problem is part of the record, because the other ranks wait for the record."""
    found: dict[str, Any] = {
        "triton": False,
        "missing": "",
        "host": "",
        "device": "",
        "request": asdict(request),
        "channels": channels,
    }
    if mapper is None:
        found["missing"] = f"memory of {device.type} devices cannot be mapped"
        return found
    try:
        found["triton"] = importlib.util.find_spec("triton") is not None
        if not found["triton"]:
            found["missing"] = "Triton is not installed. pip install 'fastcoll[triton]'"
            return found
        found["missing"] = mapper.missing()
        if not found["missing"]:
            found["host"] = mapper.host()
            found["device"] = mapper.device_identity(device)
    except Exception as error:
        found["missing"] = f"{type(error).__name__}: {error}"[:500]
    return found


def reason_against(records: Sequence[dict[str, Any]]) -> str:
    """Returns why ranks with these records, in rank order, do not map each other's memory, or ""."""
    ranks = range(len(records))
    request = records[0]["request"]
    if request["algorithm"] == "nccl":
        return "FASTCOLL_ALGO is nccl"
    measured = Thresholds(**request["thresholds"]).kernel_bytes
    if request["algorithm"] == "auto" and not measured:
        return (
            "no limit of a kernel was measured on these devices. Run `fastcoll tune --device cuda`, or set "
            "FASTCOLL_ALGO"
        )
    if len(records) > MAX_RANKS:
        return f"there are {len(records)} ranks, and the kernels support at most {MAX_RANKS}"
    for rank in ranks:
        if records[rank]["missing"]:
            return f"rank {rank}: {records[rank]['missing']}"
    if other := [rank for rank in ranks if records[rank]["host"] != records[0]["host"]]:
        return f"{names_of(other)} and rank 0 are on different hosts, or in separate containers"
    if none := [rank for rank in ranks if not records[rank]["channels"]]:
        return (
            f"{names_of(none)}: other groups of the process use all thread blocks that may wait on its device. Destroy "
            "groups that are no longer needed"
        )
    seen: dict[str, int] = {}
    for rank in ranks:
        identity = records[rank]["device"]
        if identity and identity in seen:
            return (
                f"ranks {seen[identity]} and {rank} are on one device. Give each rank its own device, or set "
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 for a test"
            )
        seen[identity] = rank
    return ""


_COMPARED = {
    "algorithm": "FASTCOLL_ALGO",
    "sizes": "version of fastcoll",
    "order": "FASTCOLL_ORDER",
}


@dataclass(frozen=True)
class Verdict:
    """What rank 0 finds in the records of all ranks.

    Attributes:
        difference: Why the settings cannot be used together, or "".
        triton: Whether all ranks have it.
        reason: Why the ranks do not map each other's memory, or "".
        thresholds: Those of rank 0.
        channels: The fewest of a rank.
        devices: Identity of each rank's device; none if there is a reason.
    """

    difference: str
    triton: bool
    reason: str
    thresholds: dict[str, int]
    channels: int
    devices: list[str]


def decide(texts: list[str]) -> str:
    """Returns rank 0's ``Verdict`` from the records of all ranks, as JSON texts."""
    records = [json.loads(text) for text in texts]
    reason = reason_against(records)
    verdict = Verdict(
        _difference(records),
        all(record["triton"] for record in records),
        reason,
        records[0]["request"]["thresholds"],
        min(record["channels"] for record in records),
        [] if reason else [record["device"] for record in records],
    )
    return json.dumps(asdict(verdict))


def _difference(records: Sequence[dict[str, Any]]) -> str:
    """Returns which setting is not the same on all ranks, or ""."""
    first = records[0]["request"]
    for rank, record in enumerate(records):
        for name, what in _COMPARED.items():
            if (value := record["request"][name]) != first[name]:
                return (
                    f"expected the same {what} on all ranks, got {first[name]} on rank 0 and {value} on rank {rank}. "
                    "Set FASTCOLL_ALGO and FASTCOLL_ORDER to the same on all ranks, and install the same fastcoll."
                )
    return ""
