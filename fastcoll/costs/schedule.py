"""Which rank sends what to whom, and when: an algorithm without its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Schedule", "Transfer"]


@dataclass(frozen=True)
class Transfer:
    """A message of one step.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        pieces: Numbers of the parts of the message that travel.
        reduces: Whether they are added to what the target has; else they replace it.
    """

    source: int
    target: int
    pieces: tuple[int, ...]
    reduces: bool


@dataclass
class Schedule:
    """The messages of a collective.

    Attributes:
        ranks: How many take part.
        pieces: Parts that the message is cut into, all equally long. Those of rank r, where a rank has its own
            (reduce_scatter, all_gather), are the r-th of ``ranks`` equal runs of them.
        phases: Lists of steps, which are lists of transfers. The steps of a phase form a pipeline: each lasts as long
            as the longest of them.
    """

    ranks: int
    pieces: int
    phases: list[list[list[Transfer]]] = field(default_factory=list)

    def phase(self, steps: Sequence[Iterable[Transfer]]) -> None:
        """Appends a phase; one without a step is none."""
        if steps:
            self.phases.append([list(step) for step in steps])
