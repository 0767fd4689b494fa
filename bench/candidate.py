"""What one backend does with one case: it is verified, and it takes turns in being timed."""

from __future__ import annotations

from fastcoll.bench import oracle
from fastcoll.bench.collectives import Case
from fastcoll.bench.turn import Call, TimedCall, synchronize

__all__ = ["Candidate"]


class Candidate(TimedCall):
    """One collective on its buffers; all ranks use it together.

    Args:
        case: Whose buffers it uses.
        call: Does the whole collective.
    """

    def __init__(self, case: Case, call: Call) -> None:
        super().__init__(call, case.send.device)
        self._case = case

    def verify(self, first_seed: int, times: int) -> int:
        """Makes calls on data of the seeds from `first_seed` on; returns this rank's wrong elements."""
        wrong = 0
        for seed in range(first_seed, first_seed + times):
            oracle.fill(self._case, seed)
            self.call()
            synchronize(self._case.send.device)
            wrong += oracle.count_wrong(self._case, seed)
        return wrong

    def clear(self) -> None:
        """Makes the buffers zero."""
        self._case.clear()
