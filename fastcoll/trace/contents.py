"""What a trace holds: calls, groups, and waits for other hosts. ``fastcoll.trace.memory`` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LANES", "STATES", "Group", "HostWait", "Names", "Record", "Trace"]

LANES = ("collective", "device", "message", "monitored_barrier")
STATES = ("scheduled", "started", "completed", "failed")


class HostWait(NamedTuple):
    """What a rank has waited for the leader of another host: all ranks of its host wait meanwhile.

    ``ticks``: in waits that have ended, times the ranks that waited. ``since``: when the present wait began, or 0.
    ``ranks``: that wait in it.
    """

    ticks: int
    since: int
    ranks: int


class Record(NamedTuple):
    """A call, as csrc/trace/record.hpp has it; times are ticks. 0: no time, no digest. ``words``: dtypes and sizes."""

    id: int
    state: int
    created: int
    started: int
    ended: int
    seq: int
    peer: int
    group: int
    stack: int
    nanos: int
    timeout_ms: int
    input_digest: int
    output_digest: int
    root: int
    tag: int
    lane: int
    op: int
    device: bool
    sends: bool
    call: int
    inputs: int
    outputs: int
    kept_inputs: int
    kept_outputs: int
    used: int
    words: tuple[int, ...]

    def shapes(self) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
        """Returns number of the dtype and sizes of each kept input, and of each kept output."""
        words, found = iter(self.words), []
        for _ in range(self.kept_inputs + self.kept_outputs):
            head = next(words)
            found.append((head & 0xFF, [next(words) for _ in range(head >> 8)]))
        return found[: self.kept_inputs], found[self.kept_inputs :]


@dataclass(frozen=True)
class Group:
    """A group: its name, this rank in it, and its ranks in the whole job."""

    name: str
    description: str
    rank: int
    ranks: list[int]


@dataclass(frozen=True)
class Names:
    """What records have as numbers: names of calls, dtypes and operations, and bytes of a dtype's element."""

    calls: list[str]
    dtypes: list[str]
    bytes: list[int]
    ops: list[str]


@dataclass(frozen=True)
class Trace:
    """The trace of a process.

    Attributes:
        pid: Its process ID; in a dump, in its own namespace.
        rank: Rank in the whole job.
        host: Name of its host.
        version: Version of fastcoll.
        reason: Why it was read.
        kept: How many records it keeps.
        recorded: How many records it ever made.
        with_stacks: Whether it records stacks.
        names: Names of the numbers in the records.
        groups: Groups by the number that records have.
        errors: Error texts by the record's number.
        stacks: Texts of stacks by the place that records have: a line with name, file and line for each frame,
            innermost first.
        records: The records, oldest first.
        hosts: Waits for other hosts, by the rank of their leader in the whole job.
        first: The moment at which it began, in ticks.
        ticks: A moment in ticks.
        nanos: The same moment in nanoseconds of CLOCK_MONOTONIC.
        wall: The same moment in nanoseconds since 1970.
        rate: Nanoseconds a tick.
    """

    pid: int
    rank: int
    host: str
    version: str
    reason: str
    kept: int
    recorded: int
    with_stacks: bool
    names: Names
    groups: dict[int, Group]
    errors: dict[int, str]
    stacks: dict[int, str]
    records: list[Record]
    hosts: dict[int, HostWait]
    first: int
    ticks: int
    nanos: int
    wall: int
    rate: float

    def wall_of(self, ticks: int) -> int:
        """Returns a time of a record in nanoseconds since 1970."""
        return self.wall + int((ticks - self.ticks) * self.rate)
