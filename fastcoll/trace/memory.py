"""How a trace is read from its memory, whose layout is that of csrc/trace/memory.hpp.

The memory is a dump, or that of a process which runs (fastcoll/trace/live.py). A record has a version, which is even,
and the same before and after a read that no writer has disturbed. Each value is checked before it is used.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

from fastcoll.trace.contents import LANES, STATES, Group, HostWait, Names, Record, Trace

__all__ = ["dump_of", "load", "owner_of"]

_MAGIC = b"FSTTRACE"
_LAYOUT = 3
_HEADER = struct.Struct("<8sIIQQQqqqqqqqQQQQQ64s")
_Header = namedtuple(
    "_Header",
    "magic layout slot_bytes slots kept texts pid first_ticks first_nanos dump_ticks dump_nanos dump_wall rank records "
    "json_version json_offset json_bytes end reason",
)
_HOST = struct.Struct("<Qqqq")
_HOSTS = 64
_VERSION = struct.Struct("<Q")
_RECORD = struct.Struct("<QQqqqQqIIqqQQiiBB??IHHBBH")
_WORDS = 40
_SLOT = _VERSION.size + _RECORD.size + 8 * _WORDS
_FIRST_SLOT = 4096
_JSON: dict[str, Any] = {
    "version": str,
    "host": str,
    "stacks": bool,
    "calls": [str],
    "dtypes": [str],
    "bytes": [int],
    "ops": [str],
    "groups": {int: {"name": str, "description": str, "rank": int, "ranks": [int]}},
    "errors": {int: str},
}
"""Types of the values in the JSON; keys are texts, of digits where int stands."""
_TRIES = 100


def owner_of(memory: Any) -> int:
    """Returns the process whose trace it is, as the process itself sees its ID; see ``load`` for the error."""
    return int(_header(memory).pid)


def dump_of(memory: Any, reason: str) -> bytes:
    """Returns a dump, which ``load`` reads, of the memory of a process that may run; see there for the error."""
    for _ in range(_TRIES):
        content = bytearray(memory[: _header(memory).end])
        header = _header(content)
        if header.json_version % 2 == 0 and header.json_version == _header(memory).json_version:
            break
        time.sleep(0.0001)
    for number in range(header.slots):
        at = _place(header, number)
        if content[at] % 2 or content[at : at + 8] != memory[at : at + 8]:
            content[at : at + 8] = bytes(8)  # a writer may have disturbed the copy
    trace = load(content)
    moment = {"dump_ticks": trace.ticks, "dump_nanos": trace.nanos, "dump_wall": trace.wall}
    header = header._replace(reason=reason.encode()[:63], **moment)
    content[: _HEADER.size] = _HEADER.pack(*header)
    return bytes(content)


def _broken(what: str) -> ValueError:
    return ValueError(f"not a dump of fastcoll.trace: {what}")


def _header(memory: Any) -> _Header:
    if len(memory) < _HEADER.size or memory[: len(_MAGIC)] != _MAGIC:
        raise _broken("it does not begin as one")
    header = _Header._make(_HEADER.unpack_from(memory))
    if header.layout != _LAYOUT:
        raise ValueError(
            f"expected a trace of layout {_LAYOUT}, got {header.layout}: another version of fastcoll made it. Use that "
            "version's fastcoll command."
        )
    return header


def load(memory: Any, newest: int | None = None) -> Trace:
    """Returns the trace in a dump, or in the memory of a process, with so many of its newest records, or all.

    Raises:
        ValueError: It is no memory of a trace, or another version of fastcoll made it.
    """
    header = _header(memory)
    slots, kept = header.slots, header.kept
    if header.slot_bytes < _SLOT or slots & (slots - 1) or not 0 < kept <= slots:
        raise _broken("the sizes of its slots are wrong")
    if not _FIRST_SLOT + slots * header.slot_bytes <= header.texts <= len(memory):
        raise _broken("it is cut off, or its slots overlap its texts")
    if header.records >> 63 or header.rank >> 32:
        raise _broken("its rank or its number of records is wrong")
    found = list(_records(memory, header, min(newest or kept, kept)))
    known = _known(memory)  # after the records, so it has all of their groups
    names = Names(known["calls"], known["dtypes"], known["bytes"], known["ops"])
    if len(names.bytes) != len(names.dtypes):
        raise _broken("JSON.bytes: expected as many as JSON.dtypes")
    groups = _groups(known["groups"])
    records = [_checked(number, one, names, groups.get(one.group)) for number, one in found]
    moment, wall = (header.dump_ticks, header.dump_nanos), header.dump_wall
    if not header.dump_ticks:
        first = (header.first_ticks, header.first_nanos)
        moment = _newest_moment(memory, header) or first
        wall = time.time_ns() - time.monotonic_ns() + moment[1]
    ticks = moment[0] - header.first_ticks
    rate = (moment[1] - header.first_nanos) / ticks if ticks > 0 else 1.0
    return Trace(
        pid=header.pid,
        rank=header.rank,
        host=known["host"],
        version=known["version"],
        reason=_printable(header.reason.rstrip(b"\0").decode(errors="replace")),
        kept=kept,
        recorded=header.records,
        with_stacks=known["stacks"],
        names=names,
        groups=groups,
        errors=known["errors"],
        stacks=_stacks(memory, header.texts, {record.stack for record in records if record.stack}),
        records=records,
        hosts=_hosts(memory),
        first=header.first_ticks,
        ticks=moment[0],
        nanos=moment[1],
        wall=wall,
        rate=rate,
    )


def _hosts(memory: Any) -> dict[int, HostWait]:
    found = {}
    for number in range(_HOSTS):
        leader, *wait = _HOST.unpack_from(memory, _HEADER.size + number * _HOST.size)
        if leader == 0:
            break
        if leader > 1 << 32 or not 0 <= wait[2] < 1 << 32:
            raise _broken(f"the waits for host {number} are wrong")
        found[leader - 1] = HostWait(*wait)
    return found


def _known(memory: Any) -> dict[str, Any]:
    """Returns the JSON; empty values if the process has made no call yet, and so no group."""
    for _ in range(_TRIES):
        header = _header(memory)
        version, at, size = header.json_version, header.json_offset, header.json_bytes
        if version == 0:
            return {key: (kind if callable(kind) else type(kind))() for key, kind in _JSON.items()}
        if version % 2 == 0 and at + size <= len(memory):
            text = bytes(memory[at : at + size])
            if _header(memory).json_version == version:
                break
        time.sleep(0.0001)
    else:
        raise _broken("its JSON cannot be read")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken("its JSON is broken") from error
    known: dict[str, Any] = _typed(value, _JSON, "JSON")
    return known


def _typed(value: Any, kind: Any, place: str) -> Any:
    """Returns a value of the JSON with printable texts; raises ValueError, with the place, if its type is wrong."""
    if isinstance(kind, list) and isinstance(value, list):
        return [_typed(one, kind[0], f"{place}[{i}]") for i, one in enumerate(value)]
    if isinstance(kind, dict) and isinstance(value, dict):
        if int not in kind:
            return {key: _typed(value.get(key), kind[key], f"{place}.{key}") for key in kind}
        if not all(re.fullmatch(r"[0-9]{1,20}", key) for key in value):
            raise _broken(f"{place}: expected numbers as keys")
        return {int(key): _typed(one, kind[int], f"{place}.{key}") for key, one in value.items()}
    if type(value) is kind and (kind is not int or 0 <= value < 1 << 32):
        return _printable(value) if kind is str else value
    expected = "int of 32 bits" if kind is int else getattr(kind, "__name__", type(kind).__name__)
    raise _broken(f"{place}: expected {expected}, got {type(value).__name__}")


def _groups(known: dict[int, Any]) -> dict[int, Group]:
    """Returns the groups by number.

    The newest one of a name has the plain name: it matters most, and ranks need not have made the same number of groups
    before it.
    """
    groups: dict[int, Group] = {}
    newer: Counter[str] = Counter()
    for number in sorted(known, reverse=True):
        name, ranks, rank = known[number]["name"], known[number]["ranks"], known[number]["rank"]
        if rank >= len(ranks) or len(set(ranks)) < len(ranks):
            raise _broken(
                f"JSON.groups.{number}: rank is not in ranks, or ranks has a number twice"
            )
        full = f"{name} earlier {newer[name]}" if newer[name] else name
        groups[number] = Group(full, known[number]["description"], rank, ranks)
        newer[name] += 1
    return dict(sorted(groups.items()))


def _place(header: _Header, number: int) -> int:
    return int(_FIRST_SLOT + (number & (header.slots - 1)) * header.slot_bytes)


def _records(memory: Any, header: _Header, count: int) -> Iterator[tuple[int, Record]]:
    """Yields number and content of each of the newest slots that no writer disturbed."""
    for number in range(max(header.records - count, 0) + 1, header.records + 1):
        at = _place(header, number)
        for _ in range(_TRIES):
            slot = memory[at : at + _SLOT]
            (version,) = _VERSION.unpack_from(slot)
            if version >> 1 != number:
                break  # not written, or overwritten since
            if version % 2 == 0 and memory[at : at + 8] == slot[:8]:
                fields = _RECORD.unpack_from(slot, 8)
                used = min(fields[-1], _WORDS)
                words = struct.unpack_from(f"<{used}Q", slot, _VERSION.size + _RECORD.size)
                yield number, Record._make((*fields, words))
                break


def _checked(number: int, record: Record, names: Names, group: Group | None) -> Record:
    """Returns the record if each number in it stands for something."""
    heads, at = [], 0
    while at < len(record.words):
        heads.append(record.words[at])
        at += 1 + (record.words[at] >> 8)
    lowest = 0 if record.sends else -1  # no sender was found yet
    holds = {
        "id": record.id == number,
        "state": record.state < len(STATES),
        "lane": record.lane < len(LANES),
        "call": record.call < len(names.calls),
        "op": record.op < len(names.ops),
        "peer": group is None
        or record.lane != LANES.index("message")
        or lowest <= record.peer < len(group.ranks),
        "shape": at == record.used == len(record.words)
        and len(heads) == record.kept_inputs + record.kept_outputs,
        "dtype": all(head & 0xFF < len(names.dtypes) for head in heads),
    }
    for what, right in holds.items():
        if not right:
            raise _broken(f"the {what} of record {number} is wrong")
    return record


def _newest_moment(memory: Any, header: _Header) -> tuple[int, int] | None:
    """Returns ticks and nanoseconds of the newest record that has both."""
    for number in range(header.records, max(header.records - header.kept, 0), -1):
        at = _place(header, number)
        slot = memory[at : at + _VERSION.size + _RECORD.size]
        if memory[at : at + 8] == slot[:8] == _VERSION.pack(2 * number):
            record = _RECORD.unpack_from(slot, 8)
            if record[9]:
                return record[2], record[9]
    return None


def _stacks(memory: Any, texts: int, places: Iterable[int]) -> dict[int, str]:
    """Returns the texts of stacks by place."""
    found, room = {}, len(memory) - texts
    for place in places:
        at = 8 * place + _VERSION.size
        size = int.from_bytes(memory[8 * place : at], "little")
        room -= size
        if 8 * place < texts or at + size > len(memory) or room < 0:
            raise _broken("a stack is cut off, or overlaps another one")
        found[place] = _printable(bytes(memory[at : at + size]).decode(errors="replace"))
    return found


def _printable(text: str, longest: int = 1 << 16) -> str:
    """Returns the text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text[:longest])
