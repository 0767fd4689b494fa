"""Reads the dumps of the ranks.

A dump is a pickle, because that is what torch's analyser reads; here only numbers, text, lists, tuples and dicts
are taken from it, so that a file of somebody else's can do no harm.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fastcoll.trace.value import Value

__all__ = ["Dump", "Entry", "Lane", "find", "loads", "parse", "read"]


_LIBRARY = re.compile(r"[/\\]torch[/\\]|site-packages[/\\]fastcoll[/\\]|^<frozen ")
"""Files whose frames say nothing of the program."""


# The unpickler that is written in Python: the other one reserves as much memory as an index in the file
# asks for.
class _PlainUnpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[pickle.Unpickler], None]]] = dict(
        pickle._Unpickler.dispatch
    )

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"not a trace: it holds a {module}.{name}")


def _text_again(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns an operation that takes a value again, limited to text.

    Lists that hold each other would be walked for ever, or nearly; ranks write each value once.
    """

    def limited(unpickler: Any) -> None:
        load(unpickler)
        if not isinstance(unpickler.stack[-1], str):
            raise pickle.UnpicklingError("not a trace: a value is in several places")

    return limited


for _code in (pickle.GET, pickle.BINGET, pickle.LONG_BINGET):
    _PlainUnpickler.dispatch[_code[0]] = _text_again(_PlainUnpickler.dispatch[_code[0]])
del _PlainUnpickler.dispatch[pickle.DUP[0]]


def loads(content: bytes) -> dict[str, Any]:
    """Returns what a dump holds.

    Raises:
        ValueError: It is no dump.
    """
    try:
        value = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"not a dump of fastcoll.trace: {said[:200]}") from error
    if not isinstance(value, dict) or "entries" not in value or "fastcoll" not in value:
        raise ValueError("not a dump of fastcoll.trace: it lacks entries or fastcoll")
    return value


@dataclass(frozen=True)
class Lane:
    """One sequence of numbers of a group.

    Attributes:
        name: As torch's analyser shows it.
        group: Name of the group.
        description: What the user called the group.
        kind: "collective", "device", "message" or "monitored_barrier".
        ranks: Global ranks, ascending.
    """

    name: str
    group: str
    description: str
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One call of one rank.

    Attributes:
        lane: Name of its lane.
        seq: Its number in the lane, from 1.
        name: "all_reduce".
        state: "scheduled", "started", "completed" or "failed".
        signature: What must be equal on all ranks.
        call: The call with sizes and dtypes, to be read.
        created_ns: When it was called, nanoseconds since 1970.
        ended_ns: When it completed or failed; 0 if it has not.
        error: What it failed with, else "".
        frames: The Python stack, innermost frame first.
        sends: Whether it is a send.
    """

    lane: str
    seq: int
    name: str
    state: str
    signature: tuple[Any, ...]
    call: str
    created_ns: int
    ended_ns: int
    error: str
    frames: tuple[Mapping[str, Any], ...]
    sends: bool

    @property
    def sources(self) -> tuple[str, ...]:
        """The lines of the program that led to the call, innermost first, three at most; none without a stack."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame["filename"])]
        return tuple(f"{_shortened(f['filename'])}:{f['line']} in {f['name']}" for f in own[:3])


def _shortened(file: str) -> str:
    """Returns the path as seen from the working directory, if it is in there."""
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file


@dataclass
class Dump:
    """The trace of one rank.

    Attributes:
        rank: Of the whole job.
        reason: Why it was written.
        host: Where.
        pid: Of the process.
        wrapped: Whether older calls were overwritten.
        lanes: By name.
        entries: By name of the lane, then by number.
    """

    rank: int
    reason: str
    host: str
    pid: int
    wrapped: bool
    lanes: dict[str, Lane] = field(default_factory=dict)
    entries: dict[str, dict[int, Entry]] = field(default_factory=dict)

    def last(self) -> Entry | None:
        """Returns the call made last, of any group; None if there is none."""
        every = [entry for lane in self.entries.values() for entry in lane.values()]
        return max(every, key=lambda entry: entry.created_ns, default=None)


def _frame(raw: Value) -> dict[str, Any]:
    return {
        "name": raw["name"].text(),
        "filename": raw["filename"].text(),
        "line": raw["line"].integer(),
    }


def _shapes(raw: Value, side: str) -> list[str]:
    sizes, dtypes = raw[f"{side}_sizes"].items(), raw[f"{side}_dtypes"].items()
    if len(sizes) != len(dtypes):
        raise ValueError(f"{raw.place} has {len(sizes)} {side}_sizes and {len(dtypes)} dtypes")
    return [
        f"{dtype.text()}{[size.integer(0) for size in shape.items()]}"
        for shape, dtype in zip(sizes, dtypes, strict=True)
    ]


def _entry(raw: Value) -> Entry:
    ours = raw["fastcoll"]
    name, inputs, outputs = ours["name"].text(), _shapes(raw, "input"), _shapes(raw, "output")
    is_message = ours["lane"].text() == "message"
    if is_message:
        parts = inputs or outputs
    elif inputs == outputs or name == "scatter":
        parts = outputs
    elif name in {"gather", "reduce"}:
        parts = inputs
    else:
        parts = [*inputs, "->", *outputs]
    left_out = ours["tensors_left_out"].integer(0)
    words = [" ".join(parts) + (f" and {left_out} more tensors" if left_out else "")]
    sends = is_message and ours["sends"].flag()
    if is_message:
        sender = ours["from"].integer(-1)
        source = "any rank" if sender < 0 else f"rank {sender}"
        words.append(f"to rank {ours['to'].integer(0)}" if sends else f"from {source}")
    op = ours["op"].text() if "op" in ours else None
    root = ours["root"].integer() if "root" in ours else None
    tag = ours["tag"].integer() if "tag" in ours else None
    named = {"op": op, "root": root, "tag": tag}
    words += [f"{key} {value}" for key, value in named.items() if value is not None]
    # What each rank gives to an all_to_all is its own affair.
    dtypes = [dtype.text() for dtype in raw["input_dtypes"].items()]
    same = parts if name != "all_to_all" else dtypes
    ended = ours["ended_ns"]
    return Entry(
        lane=raw["process_group"].items(2)[0].text(),
        seq=ours["seq"].integer(0),
        name=name,
        state=ours["state"].text(),
        signature=(None if is_message else name, tuple(same), op, root, left_out),
        call=f"{name}({', '.join(word for word in words if word)})",
        created_ns=raw["time_created_ns"].integer(),
        ended_ns=0 if ended.is_none() else ended.integer(),
        error=ours["error"].text(1 << 16) if "error" in ours else "",
        frames=tuple(_frame(frame) for frame in raw["frames"].items()),
        sends=sends,
    )


def parse(raw: Mapping[str, Any]) -> Dump:
    """Returns the dump that :func:`loads` or :func:`fastcoll.trace.dump` gave, ready to be compared.

    Raises:
        ValueError: Something in it is not what a dump has there; the message names it.
    """
    whole = Value(raw, "the dump")
    ours = whole["fastcoll"]
    dump = Dump(
        ours["rank"].integer(0),
        ours["reason"].text(),
        ours["host"].text(),
        ours["pid"].integer(0),
        ours["recorded"].integer(0) > ours["size"].integer(0),
    )
    kinds: dict[str, tuple[str, str]] = {}
    for item in whole["entries"].items():
        entry = _entry(item)
        dump.entries.setdefault(entry.lane, {})[entry.seq] = entry
        kinds[entry.lane] = (item["fastcoll"]["group"].text(), item["fastcoll"]["lane"].text())
    for name, config in whole["pg_config"].fields():
        group, kind = kinds.get(name, (name, "collective"))
        ranks = tuple(sorted(config["ranks"].numbers()))
        dump.lanes[name] = Lane(name, group, config["desc"].text(), kind, ranks)
    return dump


def find(prefix: str) -> dict[int, Path]:
    """Returns the files whose names are the prefix followed by a rank, by rank; a folder has any prefix."""
    path = Path(prefix)
    folder, start = (path, "") if path.is_dir() else (path.parent, path.name)
    pattern = re.compile((re.escape(start) if start else r"[^.].*?") + r"(\d+)")
    found = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := pattern.fullmatch(file.name)) and file.is_file():
            found[int(match[1])] = file
    return found


def read(prefix: str) -> list[Dump]:
    """Returns the dumps of all ranks, by rank.

    Raises:
        FileNotFoundError: There are none.
        ValueError: A file is no dump; the message names it.
    """
    files = find(prefix)
    if not files:
        raise FileNotFoundError(
            f"no file is named {prefix}<rank>: give what FASTCOLL_TRACE_DUMP was, or a folder"
        )
    dumps = []
    for file in files.values():
        try:
            dumps.append(parse(loads(file.read_bytes())))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    return sorted(dumps, key=lambda dump: dump.rank)
