"""What the ranks of a group tell each other through the store, so that all of them decide alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fastcoll.cuda.errors import Member, names_of

__all__ = ["Ballot"]

_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks


class Ballot:
    """Rounds in which every rank says something and hears what all have said.

    Args:
        store: For these rounds alone: no earlier life of the group has written to it.
        member: This rank.
        timeout: Seconds that a round may take.
        aborted: Whether the group was aborted meanwhile.
    """

    def __init__(
        self, store: Store, member: Member, timeout: float, aborted: Callable[[], bool]
    ) -> None:
        self._store = store
        self._member = member
        self._timeout = timeout
        self._aborted = aborted
        self._last = ""

    def gather(self, what: str, text: str) -> list[str]:
        """Returns what each rank has said, in rank order.

        Args:
            what: Name of the round.
            text: What this rank says.

        Raises:
            DistBackendError: A rank has said nothing in time, or the group was aborted.
        """
        self._store.set(f"{what}/{self._member.rank}", f"={text}")
        keys = [f"{what}/{rank}" for rank in range(self._member.size)]
        end = time.monotonic() + self._timeout
        pause = _SHORTEST
        while not self._store.check(keys):
            if self._aborted():
                raise self._member.fault("init", "the group was aborted")
            if time.monotonic() >= end:
                raise self._late(what, keys)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if self._last:  # all have read the round before, or they would not be in this one
            with contextlib.suppress(RuntimeError):  # stores need not be able to delete
                self._store.delete_key(self._last)
        self._last = keys[self._member.rank]
        return [self._store.get(key).decode()[1:] for key in keys]

    def _late(self, what: str, keys: list[str]) -> dist.DistBackendError:
        absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        have = "have" if len(absent) > 1 else "has"
        return self._member.fault(
            "init",
            f"timed out after {self._timeout * 1000:.0f} ms: {names_of(absent)} {have} not come to map memory of the "
            f"peers ({what}). Check that every rank of the group is alive, or give the group a longer timeout.",
        )
