"""Ranks that share a device, for tests on one GPU: NCCL refuses them, and kernels over mapped memory do not.

Looked for where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 says that it may be so, and NCCL_HOSTID, by which NCCL takes
ranks for ranks of different hosts, is not set. Then the ranks first tell each other their devices. If two have the
same, no communicator is made: all-reduces of floating-point tensors go by one_shot, two_shot or ring, and everything
else is refused on all ranks alike, before anything is launched. Nobody tells the other ranks of a fault there: each
finds out by its own deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll._load import C
from fastcoll.cuda.ballot import Ballot
from fastcoll.cuda.errors import Member
from fastcoll.cuda.mapping import MAPPERS
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_rendezvous import Cancelled, Rendezvous

__all__ = ["SharedDevice", "communicator_of"]

_ID_BYTES = 128  # as long as NCCL's unique id
_VERSION = 0  # of NCCL, which is not asked


def communicator_of(
    store: Store,
    member: Member,
    device: torch.device,
    timeout: timedelta,
    generation: int,
    over: Cancelled,
    config: C.NcclConfig | None = None,
) -> NcclCommunicator:
    """Makes NCCL's communicator, or what stands in for it where ranks share a device; all ranks call it.

    Args:
        store: The group's.
        member: This rank.
        device: Where its tensors lie.
        timeout: How long to wait for the other ranks.
        generation: How often the ranks of this group have called it before.
        over: When set, by another thread, the waiting ends with an error.
        config: Of NCCL's communicator.

    Raises:
        ImportError, DistBackendError, DistStoreError: As of :meth:`NcclCommunicator.create`.
    """
    mapper = MAPPERS.get(device.type)
    identity = mapper.shared_identity(device) if mapper is not None and member.size > 1 else ""
    if identity:
        seconds = timeout.total_seconds()
        instance = _instance_of_sharing(store, member, identity, seconds, generation, over)
        if instance:
            return SharedDevice(member, device, instance)
    return NcclCommunicator.create(
        store,
        group=member.group,
        rank=member.rank,
        size=member.size,
        device=device,
        timeout=timeout,
        generation=generation,
        cancelled=over,
        config=config,
    )


def _instance_of_sharing(
    store: Store, member: Member, identity: str, seconds: float, generation: int, over: Cancelled
) -> str:
    """Returns a text that is equal on all ranks and in no other call; "" if no two ranks share a device."""
    own = PrefixStore("shared_device", store)
    end = time.monotonic() + seconds
    meeting = Rendezvous(own, member, generation, _VERSION, end, seconds, over)
    agreed = meeting.exchange(lambda: secrets.token_bytes(_ID_BYTES))
    instance = hashlib.sha256(agreed).hexdigest()[:16]
    ballot = Ballot(PrefixStore(instance, own), member, seconds, over.is_set)
    devices = ballot.gather("device", identity)
    return instance if len(set(devices)) < member.size else ""


class SharedDevice(NcclCommunicator):
    """What stands in for the communicator: it has a name and a device, and refuses every call.

    Args:
        member: This rank.
        device: Where its tensors lie.
        instance: Equal on all ranks, and of no other communicator.
    """

    def __init__(self, member: Member, device: torch.device, instance: str) -> None:
        self.member = member
        self.device = device
        self.instance = instance
        self.ended_elsewhere = None
        self._closed = None
        self._lock = threading.Lock()

    def _issue(self, what: str, *arguments: Any, **options: Any) -> None:
        raise self.refused(what)

    @property
    def handle(self) -> int:
        """0: there is nothing of NCCL's."""
        return 0

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Calls that are made together are refused one by one."""
        yield

    def split(
        self, color: int, key: int, group: str, config: C.NcclConfig | None = None
    ) -> NcclCommunicator | None:
        """Refuses.

        Raises:
            ValueError: Always.
        """
        raise self.refused("nccl_split")

    def abort(self, reason: str = "the group was aborted", seconds: float | None = None) -> bool:
        """Makes every use an error."""
        self._closed = self._closed or reason
        return True

    def destroy(self, seconds: float | None = None) -> bool:
        """Makes every use an error."""
        return self.abort("the group was destroyed")

    def refused(self, what: str) -> ValueError:
        """Returns why a call cannot be made."""
        return ValueError(
            self.member.says(
                what,
                f"expected an all_reduce of floating-point tensors, as ranks of this group share {self.device} and "
                f"NCCL refuses them, got {what}. Give each rank a device of its own, or set NCCL_HOSTID to another "
                "text on each rank.",
            )
        )
