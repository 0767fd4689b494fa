"""Reads the dumps of the ranks.

A dump is a pickle, because torch's analyser reads pickles. A pickle from an unknown source can do no harm here: classes
in it are rejected, and each value is checked before use.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Dump", "Entry", "find", "loads", "parse", "read"]

_ENTRY = {
    "process_group": [str],  # name and description of its lane
    "input_sizes": [[int]],
    "input_dtypes": [str],
    "output_sizes": [[int]],
    "output_dtypes": [str],
    "time_created_ns": int,
    "frames": [{"name": str, "filename": str, "line": int}],
    "fastcoll": {
        **dict.fromkeys(("lane", "name", "state"), str),
        **dict.fromkeys(("seq", "tensors_left_out"), int),
        **dict.fromkeys(("op", "error"), (str,)),
        **dict.fromkeys(("ended_ns", "root", "tag", "from", "to"), (int,)),
        "sends": (bool,),
    },
}
_DUMP = {
    "fastcoll": {"rank": int, "reason": str, "recorded": int, "size": int},
    "pg_config": {str: {"desc": str, "ranks": str}},
    "entries": [_ENTRY],
}
"""The fields that are read, with their types; a field whose type is in a tuple may be absent."""

_LIBRARY = re.compile(r"[/\\]torch[/\\]|site-packages[/\\]fastcoll[/\\]|^<frozen ")
"""Files that are not the program's; their frames are left out."""

Entry = dict[str, Any]
"""A call of one rank: the fields of ``_ENTRY``, those of its "fastcoll" at the same level, and

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
        wrapped: Whether older calls were overwritten.
        lanes: Description and global ranks of each lane, by its name.
        entries: Calls by name of the lane, then by number.
    """

    rank: int
    reason: str
    wrapped: bool
    lanes: dict[str, tuple[str, tuple[int, ...]]]
    entries: dict[str, dict[int, Entry]]


# The unpickler written in Python: the one in C reserves memory for any index in the file, however large.
class _PlainUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _printable(text: str, longest: int = 1 << 16) -> str:
    """Returns the text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text[:longest])


def loads(content: bytes) -> dict[str, Any]:
    """Returns the content of a dump.

    Raises:
        ValueError: The bytes are no dump.
    """
    try:
        value = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        said = _printable(str(error) or type(error).__name__, 200)
        raise ValueError(f"not a dump of fastcoll.trace: {said}") from error
    if not isinstance(value, dict) or "entries" not in value or "fastcoll" not in value:
        raise ValueError("not a dump of fastcoll.trace: it lacks entries or fastcoll")
    return value


def _checked(value: Any, kind: Any, place: str) -> Any:
    """Returns the parts of a value that the kind names; raises ValueError, with the place, if a type is wrong."""
    if isinstance(kind, tuple):
        return None if value is None else _checked(value, kind[0], place)
    if isinstance(kind, list) and isinstance(value, (list, tuple)):
        return [_checked(item, kind[0], f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(kind, dict) and isinstance(value, Mapping):
        if str in kind:
            return {
                _checked(key, str, f"a key of {place}"): _checked(
                    item, kind[str], f"{place}[{str(key)[:40]!a}]"
                )
                for key, item in value.items()
            }
        return {key: _checked(value.get(key), kind[key], f"{place}.{key}") for key in kind}
    if type(value) is kind and (kind is not int or -(1 << 63) <= value < 1 << 64):
        return _printable(value) if kind is str else value
    expected = (
        "a number of 64 bits" if kind is int else getattr(kind, "__name__", type(kind).__name__)
    )
    raise ValueError(f"{place}: expected {expected}, got {type(value).__name__}")


def _described(entry: Entry) -> tuple[str, tuple[Any, ...]]:
    """Returns the text of the call, and its signature."""
    name, is_message, left_out = (
        entry["name"],
        entry["lane"] == "message",
        entry["tensors_left_out"],
    )
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


def _sources(entry: Entry) -> list[str]:
    here = f"{Path.cwd()}/"
    own = [frame for frame in entry["frames"] if not _LIBRARY.search(frame["filename"])]
    return [f"{f['filename'].removeprefix(here)}:{f['line']} in {f['name']}" for f in own[:3]]


def parse(raw: Mapping[str, Any]) -> Dump:
    """Returns the result of ``loads`` or ``fastcoll.trace.dump`` in the form that is compared.

    Raises:
        ValueError: A field has a wrong type; the message names it.
    """
    whole = _checked(raw, _DUMP, "dump")
    ours, lanes, entries = whole["fastcoll"], {}, dict[str, dict[int, Entry]]()
    for name, config in whole["pg_config"].items():
        if not re.fullmatch(r"\[(\d{1,9}(, \d{1,9})*)?\]", config["ranks"]):
            raise ValueError("ranks in pg_config is not a list such as [0, 1]")
        ranks = sorted(map(int, re.findall(r"\d+", config["ranks"])))
        lanes[name] = (config["desc"], tuple(ranks))
    for one in whole["entries"]:
        entry = {**one, **one["fastcoll"], "sources": _sources(one)}
        entry["call"], entry["signature"] = _described(entry)
        lane, _ = one["process_group"]
        entries.setdefault(lane, {})[entry["seq"]] = entry
    return Dump(ours["rank"], ours["reason"], ours["recorded"] > ours["size"], lanes, entries)


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


def read(prefix: str) -> list[Dump]:
    """Returns the dumps of all ranks, by rank.

    Raises:
        FileNotFoundError: There are no dumps.
        ValueError: A file is no dump; the message names it.
    """
    files = find(prefix)
    if not files:
        raise FileNotFoundError(
            f"no file is named {prefix}<rank>. Pass the value of FASTCOLL_TRACE_DUMP, or a folder."
        )
    dumps = []
    for file in files.values():
        try:
            dumps.append(parse(loads(file.read_bytes())))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    return sorted(dumps, key=lambda dump: dump.rank)
