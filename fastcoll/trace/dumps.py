"""Reads the dumps of the ranks, and puts their calls into the form that is compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll.trace.contents import Trace
from fastcoll.trace.memory import load

__all__ = ["Dump", "Entry", "find", "parse", "program_lines", "read"]

_LIBRARY = re.compile(r"[/\\]torch[/\\]|site-packages[/\\]fastcoll[/\\]|^<frozen ")
"""Files that are not the program's; their frames are left out."""

_ABSENT = ("op", "root", "tag", "from", "to", "sends", "error", "input_digest", "output_digest")
"""Fields of an entry's "fastcoll" that only some calls have."""

Entry = dict[str, Any]
"""A call of one rank: the fields of the flight recorder, those of its "fastcoll" at the same level, and

- "signature": the values that must be equal on all ranks;
- "call": the call with sizes and dtypes, as text;
- "sources": the program's lines that made the call, innermost first, at most three.
"""


@dataclass(frozen=True)
class Dump:
    """The trace of one rank.

    Attributes:
        rank: Rank in the whole job.
        reason: Why the dump was written.
        recorded: How many calls it ever recorded.
        wrapped: Whether older calls were overwritten.
        lanes: Description and global ranks of each lane, by its name.
        entries: Calls by name of the lane, then by number.
        last: The last call, and its lane before it.
    """

    rank: int
    reason: str
    recorded: int
    wrapped: bool
    lanes: dict[str, tuple[str, tuple[int, ...]]]
    entries: dict[str, dict[int, Entry]]
    last: tuple[str, Entry] | None


def _described(entry: Entry) -> tuple[str, tuple[Any, ...]]:
    """Returns the text of the call, and its signature."""
    name, left_out = entry["name"], entry["tensors_left_out"]
    is_message = entry["lane"] == "message"
    inputs, outputs = (
        [f"{d}{s}" for d, s in zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=True)]
        for side in ("input", "output")
    )
    if is_message:
        parts = inputs or outputs
    elif inputs == outputs or name == "scatter":
        parts = outputs
    elif name in {"gather", "reduce"}:
        parts = inputs
    else:
        parts = [*inputs, "->", *outputs]
    words = [" ".join(parts) + (f" and {left_out} more tensors" if left_out else "")]
    if is_message and entry["sends"]:
        words.append(f"to rank {entry['to']}")
    elif is_message:
        known = entry["from"] is not None and entry["from"] >= 0
        words.append(f"from rank {entry['from']}" if known else "from any rank")
    words += [f"{key} {entry[key]}" for key in ("op", "root", "tag") if entry[key] is not None]
    # In an all_to_all the sizes may differ between ranks.
    same = parts if name != "all_to_all" else entry["input_dtypes"]
    signature = (None if is_message else name, tuple(same), entry["op"], entry["root"], left_out)
    return f"{name}({', '.join(word for word in words if word)})", signature


def program_lines(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the program's own lines of a stack, innermost first, at most three."""
    here = f"{Path.cwd()}/"
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])]
    return [f"{f['filename'].removeprefix(here)}:{f['line']} in {f['name']}" for f in own[:3]]


def parse(raw: Mapping[str, Any]) -> Dump:
    """Returns the result of ``flight_recorder`` or ``fastcoll.trace.dump`` in the form that is compared."""
    ours, entries = raw["fastcoll"], dict[str, dict[int, Entry]]()
    lanes = {
        name: (config["desc"], tuple(sorted(map(int, re.findall(r"\d+", config["ranks"])))))
        for name, config in raw["pg_config"].items()
    }
    for one in raw["entries"]:
        entry = {
            **dict.fromkeys(_ABSENT),
            **one,
            **one["fastcoll"],
            "sources": program_lines(one["frames"]),
        }
        entry["call"], entry["signature"] = _described(entry)
        lane, _ = one["process_group"]
        entries.setdefault(lane, {})[entry["seq"]] = entry
    every = ((name, entry) for name, found in entries.items() for entry in found.values())
    last = max(every, key=lambda one: one[1]["time_created_ns"], default=None)
    recorded = ours["recorded"]
    wrapped = recorded > ours["size"]
    return Dump(ours["rank"], ours["reason"], recorded, wrapped, lanes, entries, last)


def find(prefix: str) -> dict[int, Path]:
    """Returns the files named by the prefix and a rank, by rank; a folder stands for any prefix in it."""
    path = Path(prefix)
    folder, start = (path, "") if path.is_dir() else (path.parent, path.name)
    pattern = re.compile((re.escape(start) if start else r"[^.].*?") + r"(\d+)")
    return {
        int(match[1]): file
        for file in sorted(folder.glob("*"))
        if (match := pattern.fullmatch(file.name)) and file.is_file()
    }


def read(prefix: str) -> list[Trace]:
    """Returns the traces in the dumps of all ranks, by rank.

    Raises:
        FileNotFoundError: There are no dumps.
        ValueError: A file is no dump, or of the rank of another one; the message names it.
    """
    files = find(prefix)
    if not files:
        raise FileNotFoundError(
            f"no file is named {prefix}<rank>. Pass the value of FASTCOLL_TRACE_DUMP, or a folder."
        )
    traces: dict[int, Trace] = {}
    for file in files.values():
        try:
            trace = load(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        if trace.rank in traces:
            raise ValueError(f"{file}: another file is of rank {trace.rank} too")
        traces[trace.rank] = trace
    return [traces[rank] for rank in sorted(traces)]
