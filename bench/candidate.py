"""What one backend does with one case: it is verified, and it takes turns in being timed."""

from __future__ import annotations

from abc import abstractmethod

from fastcoll.bench import oracle
from fastcoll.bench.collectives import Case
from fastcoll.bench.turn import Call, Timed, TimedCall, synchronize

__all__ = ["Candidate", "CaseCall"]


class Candidate(Timed):
    """One collective on its buffers; all ranks use it together."""

    @abstractmethod
    def verify(self, first_seed: int, times: int) -> int:
        """Makes calls on data of the seeds from `first_seed` on; returns this rank's wrong elements."""

    @abstractmethod
    def clear(self) -> None:
        """Makes the buffers zero."""


class CaseCall(TimedCall, Candidate):
    """A call of this process.

    Args:
        case: Whose buffers it uses.
        call: Does the whole collective.
    """

    def __init__(self, case: Case, call: Call) -> None:
        super().__init__(call, case.send.device)
        self._case = case

    def verify(self, first_seed: int, times: int) -> int:
        """Fills the buffers, calls, and compares with the oracle."""
        wrong = 0
        for seed in range(first_seed, first_seed + times):
            oracle.fill(self._case, seed)
            self.call()
            synchronize(self._case.send.device)
            wrong += oracle.count_wrong(self._case, seed)
        return wrong

    def clear(self) -> None:
        """Writes zeros."""
        self._case.clear()
