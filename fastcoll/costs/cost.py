"""What an algorithm costs: its steps, what travels, and the time of both."""

from __future__ import annotations

from dataclasses import dataclass

from fastcoll.costs.machine import Machine, Number

__all__ = ["Cost", "Steps"]


@dataclass(frozen=True)
class Steps:
    """Equally long steps that follow each other; in a step all ranks send and receive, then reduce what came.

    A rank may deal with several peers in a step: their bytes share its port, their latencies pass together. Nobody
    begins a step before everybody has ended the last one.

    Attributes:
        count: How many.
        intra: Bytes that the busiest rank sends, or receives, in its node in one step; None if nobody does.
        inter: The same, between nodes.
        reduced: Bytes that the busiest rank adds to what it has.
    """

    count: int
    intra: Number | None
    inter: Number | None = None
    reduced: Number = 0

    def seconds(self, machine: Machine) -> Number:
        """Returns the time of all of them: count * (max over the links of (alpha + beta * bytes) + gamma * reduced)."""
        links = ((machine.intra, self.intra), (machine.inter, self.inter))
        transfers = [
            link.latency + size * link.seconds_per_byte for link, size in links if size is not None
        ]
        return self.count * (
            max(transfers, default=0) + self.reduced * machine.reduce_seconds_per_byte
        )


@dataclass(frozen=True)
class Cost:
    """What a collective costs.

    Attributes:
        parts: Its steps, in order.
        wire_bytes: The most that any rank sends.
        inter_bytes: The most that any rank sends to other nodes.
    """

    parts: tuple[Steps, ...]
    wire_bytes: Number
    inter_bytes: Number = 0

    @property
    def steps(self) -> int:
        """How often a latency passes."""
        return sum(part.count for part in self.parts)

    def seconds(self, machine: Machine) -> Number:
        """Returns the predicted time of a call."""
        steps: Number = sum(part.seconds(machine) for part in self.parts)
        return machine.call + steps
