"""Reads the memory of a trace, of a process that runs or hangs or as a dump; the layout is csrc/trace/memory.hpp's.

The process takes no part in it, and sees nothing of it. A record has a version, which is even and the same before and
after a read that no writer has disturbed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Group", "Names", "Record", "Trace", "load", "read", "traced_processes"]

_MAGIC = b"FSTTRACE"
_LAYOUT = 1
_HEADER = struct.Struct("<8sIIQQQqqqqqqqQQQQ64s")
_VERSION = struct.Struct("<Q")
_RECORD = struct.Struct("<QQqqqQqIIqqiiBB??IHHBBH")
_WORDS = 40
_SLOT = _VERSION.size + _RECORD.size + 8 * _WORDS
_TRIES = 100
_LINK = "/memfd:trace.fastcoll"

LANES = ("collective", "device", "message", "monitored_barrier")
STATES = ("scheduled", "started", "completed", "failed")


class Record(NamedTuple):
    """A call, as csrc/trace/record.hpp has it; times are ticks, 0 for none. ``words``: dtypes and sizes."""

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
        stacks: Texts of stacks by the place that records have: a line "name\\tfile\\tline" a frame, innermost first.
        records: The records, oldest first.
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
    ticks: int
    nanos: int
    wall: int
    rate: float

    def wall_of(self, ticks: int) -> int:
        """Returns a time of a record in nanoseconds since 1970."""
        return self.wall + int((ticks - self.ticks) * self.rate)

    def nanos_of(self, ticks: int) -> float:
        """Returns a time of a record in nanoseconds of CLOCK_MONOTONIC."""
        return self.nanos + (ticks - self.ticks) * self.rate


def traced_processes() -> Iterator[int]:
    """Yields the processes of this user that have a trace; by pid, ascending."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if _descriptors(pid):
                yield pid
        except OSError:  # it has ended, or is another user's
            continue


def read(pid: int, newest: int | None = None) -> Trace:
    """Returns the trace of a process of this host.

    Args:
        pid: The process.
        newest: How many of the newest records to read; all by default.

    Raises:
        ProcessLookupError: There is no such process.
        PermissionError: It is another user's.
        ValueError: It has no trace, or another version of fastcoll made it.
    """
    try:
        paths = _descriptors(pid)
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    except PermissionError:
        raise PermissionError(
            f"process {pid} belongs to another user, or is protected. Run this as the user of the job."
        ) from None
    own = _pid_in_namespace(pid)
    for path in paths:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memory:
            # A forked child has its parent's descriptor too.
            if _header(memory)[6] == own:
                return replace(_trace(memory, newest), pid=pid)
    raise ValueError(
        f"process {pid} has no trace: it has made no group of fastcoll, or FASTCOLL_TRACE_SIZE is 0"
    )


def load(content: bytes) -> Trace:
    """Returns the trace in a dump.

    Raises:
        ValueError: The bytes are no dump.
    """
    try:
        return _trace(content, None)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"not a dump of fastcoll.trace: {type(error).__name__}") from error
    except (RecursionError, StopIteration, MemoryError) as error:
        raise ValueError("not a dump of fastcoll.trace: it is broken") from error


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith(_LINK):
                found.append(f"{folder}/{name}")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def _pid_in_namespace(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def _header(memory: Any) -> tuple[Any, ...]:
    if len(memory) < _HEADER.size or memory[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a dump of fastcoll.trace")
    header = _HEADER.unpack_from(memory)
    if header[1] != _LAYOUT:
        raise ValueError(
            f"expected a trace of layout {_LAYOUT}, got {header[1]}: another version of fastcoll made it. Use that "
            "version's fastcoll command."
        )
    return header


def _trace(memory: Any, newest: int | None) -> Trace:
    known = _known(memory)
    (
        _,
        _,
        slot_bytes,
        slots,
        kept,
        texts,
        pid,
        first_ticks,
        first_nanos,
        dump_ticks,
        dump_nanos,
        wall,
        rank,
    ) = _header(memory)[:13]
    if slot_bytes < _SLOT or slots & (slots - 1) or not 0 < kept <= slots or texts > len(memory):
        raise ValueError("not a dump of fastcoll.trace: its sizes are wrong")
    if slots * slot_bytes > texts:
        raise ValueError("not a dump of fastcoll.trace: its slots overlap its texts")
    recorded = _header(memory)[13]
    records = list(_records(memory, slot_bytes, slots, min(newest or kept, kept), recorded))
    moment = (dump_ticks, dump_nanos)
    if not dump_ticks:
        moment = _newest_moment(memory, slot_bytes, slots, kept, recorded) or (
            first_ticks,
            first_nanos,
        )
        wall = time.time_ns() - time.monotonic_ns() + moment[1]
    rate = (moment[1] - first_nanos) / (moment[0] - first_ticks) if moment[0] > first_ticks else 1.0
    places = {record.stack for record in records if record.stack}
    return Trace(
        pid=pid,
        rank=rank,
        host=_printable(known["host"]),
        version=_printable(known["version"]),
        reason=_printable(_header(memory)[17].rstrip(b"\0").decode(errors="replace")),
        kept=kept,
        recorded=recorded,
        with_stacks=bool(known["stacks"]),
        names=Names(
            [_printable(name) for name in known["calls"]],
            [_printable(name) for name in known["dtypes"]],
            [int(size) for size in known["bytes"]],
            [_printable(name) for name in known["ops"]],
        ),
        groups={
            int(number): Group(
                _printable(one["name"]),
                _printable(one["description"]),
                int(one["rank"]),
                [int(rank) for rank in one["ranks"]],
            )
            for number, one in known["groups"].items()
        },
        errors={int(number): _printable(text) for number, text in known["errors"].items()},
        stacks={place: _text(memory, 8 * place) for place in places},
        records=records,
        ticks=moment[0],
        nanos=moment[1],
        wall=wall,
        rate=rate,
    )


def _known(memory: Any) -> dict[str, Any]:
    for _ in range(_TRIES):
        version, at, size = _header(memory)[14:17]
        if version % 2 == 0 and at + size <= len(memory):
            text = bytes(memory[at : at + size])
            if _header(memory)[14] == version:
                found = json.loads(text) if text else None
                if not isinstance(found, dict):
                    break
                return found
        time.sleep(0.0001)
    raise ValueError("not a dump of fastcoll.trace: it has no groups yet, or they cannot be read")


def _records(
    memory: Any, slot_bytes: int, slots: int, kept: int, recorded: int
) -> Iterator[Record]:
    for number in range(max(recorded - kept, 0) + 1, recorded + 1):
        at = 4096 + (number & (slots - 1)) * slot_bytes
        for _ in range(_TRIES):
            slot = memory[at : at + _SLOT]
            (version,) = _VERSION.unpack_from(slot)
            if version >> 1 != number:
                break  # not written, or overwritten since
            if version % 2 == 0 and memory[at : at + 8] == slot[:8]:
                fields = _RECORD.unpack_from(slot, 8)
                if fields[-1] > _WORDS:
                    raise ValueError("not a dump of fastcoll.trace: a record is too long")
                words = struct.unpack_from(f"<{fields[-1]}Q", slot, 8 + _RECORD.size)
                yield Record(*fields, words)
                break


def _newest_moment(
    memory: Any, slot_bytes: int, slots: int, kept: int, recorded: int
) -> tuple[int, int] | None:
    """Returns ticks and nanoseconds of the newest record that has both."""
    for number in range(recorded, max(recorded - kept, 0), -1):
        at = 4096 + (number & (slots - 1)) * slot_bytes
        slot = memory[at : at + _VERSION.size + _RECORD.size]
        if memory[at : at + 8] == slot[:8] == _VERSION.pack(2 * number):
            record = _RECORD.unpack_from(slot, 8)
            if record[9]:
                return record[2], record[9]
    return None


def _text(memory: Any, at: int) -> str:
    (size,) = _VERSION.unpack_from(memory, at)
    return _printable(bytes(memory[at + 8 : at + 8 + min(size, 1 << 16)]).decode(errors="replace"))


def _printable(text: str, longest: int = 1 << 16) -> str:
    """Returns the text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text[:longest])
