"""What the ranks of a group tell each other through the store, so that all of them decide alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import Store

from fastcoll._load import C
from fastcoll.cuda import deadline
from fastcoll.cuda.errors import ABORTED, Member, names_of

__all__ = ["Ballot", "Refused"]

Value = TypeVar("Value")

_LOOK = 0.05  # seconds between two looks at the peers' lives


class Refused(Exception):
    """One rank could not do what all were to do; the text, equal on all ranks, names it and says why."""


class Ballot:
    """Rounds in which every rank says something and hears what all have said.

    Args:
        store: For these rounds alone: no earlier life of the group has written to it.
        member: This rank.
        timeout: Seconds that a round may take.
        aborted: Whether the group was aborted meanwhile.
        dead: The ranks that are known to have died.
    """

    def __init__(
        self,
        store: Store,
        member: Member,
        timeout: float,
        aborted: Callable[[], bool],
        dead: Callable[[], list[int]] = list,
    ) -> None:
        self._roster = C.Roster(store, "ballot", member.rank, member.size)
        self._member = member
        self._timeout = timeout
        self._aborted = aborted
        self._dead = dead

    def look(self) -> None:
        """Ends a wait that is of no use any more.

        Raises:
            DistBackendError: The group was aborted, or a rank has died.
        """
        if self._aborted():
            raise self._member.fault("init", ABORTED)
        if dead := self._dead():
            raise self._member.fault(
                "init",
                f"{names_of(dead)} died before the ranks had mapped each other's memory. Read the end of its log and "
                "the system's log.",
            )

    def gather(self, what: str, text: str) -> list[str]:
        """Returns what each rank has said, in rank order.

        Args:
            what: Name of the round.
            text: What this rank says.

        Raises:
            DistBackendError: A rank has said nothing in time, or the group was aborted.
        """
        end = time.monotonic() + self._timeout

        def look() -> None:
            self.look()
            if time.monotonic() < end:
                return
            absent = self._roster.silent(what) or [0]  # which has not told what all say
            have = "have" if len(absent) > 1 else "has"
            raise self._member.fault(
                "init",
                f"timed out after {self._timeout * 1000:.0f} ms: {names_of(absent)} {have} not arrived to map the "
                f"peers' memory ({what}). Check that every rank of the group is alive, or raise the group's timeout.",
            )

        said = self._roster.exchange(what, text.encode(), look)
        assert said is not None  # no roster is watched
        return [one.decode() for one in said]

    def together(self, what: str, function: Callable[[], Value], patience: float) -> Value:
        """Has every rank do something that may fail or hang, and hears from all whether they could.

        Args:
            what: Name of the round.
            function: What this rank does, on a thread that is left behind if it does not end.
            patience: Seconds that it may take.

        Returns:
            What the function returns here.

        Raises:
            Refused: A rank could not; equal on all ranks.
            DistBackendError: A rank has said nothing in time, has died, or the group was aborted.
        """
        made: list[Value] = []
        refusal = ""
        try:
            call = deadline.start(function)
            end = time.monotonic() + patience
            while not call.wait(_LOOK):
                self.look()
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"the set-up of the kernels has not ended after {patience:g} s (step {what})"
                    )
            made.append(call.result())
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
        answers = self.gather(what, refusal)
        refusals = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if refusals:
            # Who waited in vain for another rank has less to say than that rank.
            raise Refused(min(refusals, key=lambda text: ": PeerFault: " in text))
        return made[0]
