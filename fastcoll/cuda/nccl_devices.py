"""The communicators of one group on this rank: one for each device, made when first used."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl import NcclCommunicator

__all__ = ["DeviceCommunicators"]


class DeviceCommunicators:
    """Makes communicators on demand. All ranks of the group must ask for their first, second, ... together.

    Args:
        store: The group's.
        group: Its name.
        rank: This process in the group.
        size: Number of ranks.
        timeout: How long the making of a communicator waits for the other ranks.
        eager: The device to make one for at once, as where torch was told which device a process uses.

    Raises:
        DistBackendError: An eager communicator could not be made.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        rank: int,
        size: int,
        timeout: timedelta,
        eager: torch.device | None = None,
    ) -> None:
        self._store = store
        self._member = Member(group, rank, size)
        self._timeout = timeout
        self._by_device: dict[torch.device, NcclCommunicator] = {}
        self._made = 0
        self._making = threading.Lock()
        self._over = threading.Event()
        self._reason = ""
        if eager is not None:
            self.on(eager)

    def on(self, device: torch.device) -> NcclCommunicator:
        """Returns the communicator of a device, making it if there is none.

        Raises:
            DistBackendError: It could not be made, or the group's communicators were aborted or destroyed.
        """
        known = self._by_device.get(device)
        if known is not None:
            return known
        with self._making:
            if self._over.is_set():
                raise self._member.fault("nccl_init", self._reason)
            if device not in self._by_device:
                generation, self._made = self._made, self._made + 1
                made = NcclCommunicator.create(
                    self._store,
                    group=self._member.group,
                    rank=self._member.rank,
                    size=self._member.size,
                    device=device,
                    timeout=self._timeout,
                    generation=generation,
                    cancelled=self._over,
                )
                self._by_device[device] = made
                if self._over.is_set():  # too late for the making to notice
                    made.abort(self._reason)
            return self._by_device[device]

    def all(self) -> list[NcclCommunicator]:
        """Returns those that have been made."""
        return list(self._by_device.values())

    def abort(self, reason: str = "the communicator was aborted") -> bool:
        """Aborts all, also one that is being made; returns whether NCCL has freed them."""
        self._reason = self._reason or reason
        self._over.set()
        return sum(not one.abort(reason) for one in self.all()) == 0

    def destroy(self) -> bool:
        """Destroys all; returns whether NCCL has freed them."""
        self._reason = self._reason or "the communicators of this group were destroyed"
        self._over.set()
        return sum(not one.destroy() for one in self.all()) == 0
