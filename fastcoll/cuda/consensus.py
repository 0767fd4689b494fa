"""Rounds of messages through the store by which all ranks of a group reach the same decision."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store

from fastcoll._load_cuda import CUDA
from fastcoll.cuda import deadline
from fastcoll.cuda.errors import Member, names_of

__all__ = ["Consensus", "Refused"]

Value = TypeVar("Value")

_LOOK = 0.05  # seconds between two looks at the group
_PATIENCE = 60.0  # seconds for a common step, at most: all ranks have arrived, and NCCL would do
_SHORT, _LONG = 50e-6, 0.01  # seconds between two polls of the store


class Refused(Exception):
    """A rank failed in a common step; the text, equal on all ranks, names the rank and the reason."""


@dataclass(eq=False, repr=False)
class Consensus:
    """Rounds in which every rank posts a text and reads the texts of all ranks.

    Attributes:
        store: For these rounds only: no earlier instance of the group has written to it.
        member: This rank.
        timeout: Seconds that a round may take.
        abort_cause: Returns why the group was aborted meanwhile, or "".
    """

    store: Store
    member: Member
    timeout: float
    abort_cause: Callable[[], str]

    def __post_init__(self) -> None:
        self._roster = CUDA.Roster(self.store, "consensus", self.member.rank, self.member.size)

    @property
    def patience(self) -> float:
        """Seconds that a common step may take; the other ranks wait for the answer for the whole timeout."""
        return min(self.timeout / 2, _PATIENCE)

    def look(self) -> None:
        """Ends a wait that can no longer succeed.

        Raises:
            DistBackendError: The group was aborted.
        """
        if cause := self.abort_cause():
            raise self.member.fault("init", f"the group was aborted: {cause}")

    def gather(self, what: str, text: str) -> list[str]:
        """Returns the text of each rank, in rank order.

        Args:
            what: Name of the round.
            text: This rank's text.

        Raises:
            DistBackendError: A rank posted nothing in time, or the group was aborted.
        """
        look = self._waiting(what, lambda: self._roster.missing(what))
        said = self._roster.exchange(what, text.encode(), look)
        assert said is not None  # no roster is watched
        return [one.decode() for one in said]

    def decided(self, what: str, text: str, decide: Callable[[list[str]], str]) -> str:
        """Returns what rank 0 makes of the texts of all ranks. The other ranks read no more than that.

        Args:
            what: Name of the round.
            text: This rank's text.
            decide: Called on rank 0 with the texts in rank order; it must not raise.

        Raises:
            DistBackendError: A rank posted nothing in time, or the group was aborted.
        """
        store, rank = self.store, self.member.rank
        keys = [f"{what}/{other}" for other in range(self.member.size)]
        store.set(keys[rank], text)
        look = self._waiting(
            what, lambda: [other for other, key in enumerate(keys) if not store.check([key])]
        )
        pause = _SHORT
        while not store.check(keys if rank == 0 else [what]):
            look()
            time.sleep(pause)
            pause = min(2 * pause, _LONG)
        if rank == 0:
            store.set(what, decide([store.get(key).decode() for key in keys]))
        with contextlib.suppress(Exception):  # not every store can
            store.delete_key(keys[rank])
        return store.get(what).decode()

    def _waiting(self, what: str, missing: Callable[[], list[int]]) -> Callable[[], None]:
        """Returns what to call between two polls of the store; it raises as ``gather``."""
        end = time.monotonic() + self.timeout

        def look() -> None:
            self.look()
            if time.monotonic() < end:
                return
            absent = missing() or [0]  # rank 0 has not posted the collected texts
            have = "have" if len(absent) > 1 else "has"
            raise self.member.fault(
                "init",
                f"timed out after {self.timeout * 1000:.0f} ms: {names_of(absent)} {have} not arrived to map the "
                f"peers' memory ({what}). Check that every rank of the group is alive, or raise the group's timeout.",
            )

        return look

    def together(self, what: str, function: Callable[[], Value]) -> Value:
        """Runs a step on every rank that may fail or hang, and collects from all ranks whether it succeeded.

        Args:
            what: Name of the round.
            function: This rank's step, run on a thread that is left behind if it does not end.

        Returns:
            The function's result on this rank.

        Raises:
            Refused: A rank failed; equal on all ranks.
            DistBackendError: A rank posted nothing in time, or the group was aborted.
        """
        made: list[Value] = []
        refusal = ""
        try:
            call = deadline.start(function)
            end = time.monotonic() + self.patience
            while not call.wait(_LOOK):
                self.look()
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"the set-up of the kernels has not ended after {self.patience:g} s (step {what})"
                    )
            made.append(call.result())
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
        answers = self.gather(what, refusal)
        refusals = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if refusals:
            # Prefer the cause: a rank with a PeerFault only waited in vain for another rank.
            raise Refused(min(refusals, key=lambda text: ": PeerFault: " in text))
        return made[0]
