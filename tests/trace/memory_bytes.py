"""Builds the bytes of a dump, by the layout of csrc/trace/memory.hpp."""

import json
import struct
from collections.abc import Sequence
from typing import Any

from fastcoll.trace.contents import Record
from fastcoll.trace.memory import _FIRST_SLOT, _HEADER, _LAYOUT, _RECORD, _SLOT, _WORDS, _Header

SLOTS = 4
TEXTS = _FIRST_SLOT + SLOTS * _SLOT
GROUP = {"name": "0", "description": "default_pg", "rank": 0, "ranks": [0, 1]}
NAMES = {
    "calls": ["all_reduce", "send", "broadcast"],
    "dtypes": ["uint8", "float32"],
    "ops": ["SUM", "-"],
}
KNOWN = {"version": "1", "host": "h", "stacks": True, "bytes": [1, 4], **NAMES}
KNOWN |= {"groups": {"1": GROUP}, "errors": {"2": "a fault"}}


def record(number: int, **fields: Any) -> Record:
    """Return a record of a completed all_reduce of float32[3, 4], or with these fields."""
    words = fields.get("words", 2 * (2 << 8 | 1, 3, 4))
    times = (1000 * number, 1000 * number, 1000 * number + 500)
    rest = (0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, len(words), words)
    return Record(number, 2, *times, number, -1, 1, *rest)._replace(**fields)


FAILED = record(2, state=3, root=1, stack=TEXTS // 8)
SENT = {"lane": 2, "call": 1, "op": 1, "peer": 1, "sends": True, "kept_outputs": 0}
RECORDS = [
    record(1, input_digest=7, output_digest=1 << 63),
    FAILED,
    record(3, seq=1, words=(1 << 8 | 1, 4), **SENT),
]
STACK = b"step\t/train.py\t7\nmain\t/train.py\t9\n"


def dump(held: Sequence[Record] = RECORDS, text: str = json.dumps(KNOWN), **header: Any) -> bytes:
    """Return a dump with these records, JSON, and fields of the header."""
    slots = bytes(_SLOT)
    for number, one in enumerate(held, 1):
        words = struct.pack(f"<{_WORDS}Q", *one.words, *[0] * (_WORDS - len(one.words)))
        slots += struct.pack("<Q", 2 * number) + _RECORD.pack(*one[:-1]) + words
    stack = struct.pack("<Q", len(STACK)) + STACK
    sizes = (_SLOT, SLOTS, SLOTS, TEXTS, 1, 0, 0, 10000, 10000, 10000, 0, len(held))
    place = (2, TEXTS + len(stack), len(text.encode()), 0)
    head = _Header(b"FSTTRACE", _LAYOUT, *sizes, *place, b"asked for")._replace(**header)
    page = _HEADER.pack(*head).ljust(_FIRST_SLOT, b"\0")
    return (page + slots).ljust(TEXTS, b"\0") + stack + text.encode()
