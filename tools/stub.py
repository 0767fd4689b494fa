"""Writes the fields of Options and Tuning into fastcoll/_C.pyi, from settings.def and tuning.def.

    python tools/stub.py [--check]

With --check it writes nothing, and fails if the stub differs.
"""

import re
import sys
import textwrap
from typing import Any

from repository import ROOT

from fastcoll import env

STUB = ROOT / "fastcoll" / "_C.pyi"
TYPES = {"TEXT": "str", "CHOICE": "str", "INTEGER": "int", "SWITCH": "bool", "SIZE": "int"}


def fields(path: str) -> list[tuple[str, str, object, str]]:
    """Returns name, type, default and description of the fields that a .def file describes."""
    found = []
    for kind, names, literals in env.rows(ROOT / path):
        if kind == "SIZE":
            name, default, meaning = literals
        elif "GROUP" not in names:
            continue
        else:
            variable, _, default, *limits, meaning = literals
            name = variable.removeprefix("FASTCOLL_").lower()
            if kind == "CHOICE":
                meaning = f"{meaning} One of {', '.join(limits[0])}."
            if kind == "INTEGER":
                meaning = f"{meaning} {limits[0]} to {limits[1]}."
            if kind == "SWITCH":
                default = bool(default)
                meaning = re.sub("^1 ", "True ", re.sub("^0 ", "False ", meaning))
        found.append((name, TYPES[kind], default, re.sub(r"`+([^`]*)`+", r"``\1``", meaning)))
    return found


def described(path: str) -> str:
    """Returns the lines of a docstring about the fields of a .def file."""
    lines = (f"{name}: {meaning}" for name, _, _, meaning in fields(path))
    shape: dict[str, Any] = {"width": 119, "initial_indent": " " * 8, "subsequent_indent": " " * 12}
    return "".join(textwrap.fill(line, break_long_words=False, **shape) + "\n" for line in lines)


def typed(path: str) -> str:
    """Returns the fields of a .def file with their types."""
    return "".join(f"    {name}: {kind}\n" for name, kind, _, _ in fields(path))


def arguments(path: str) -> str:
    """Returns the fields of a .def file as arguments of a constructor."""
    return "".join(
        f"        {name}: {kind} = {json_like(default)},\n"
        for name, kind, default, _ in fields(path)
    )


def json_like(value: object) -> str:
    """Returns a literal with double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def place(text: str, after: str, before: str, new: str) -> str:
    """Returns the text with `new` between two strings; the first occurs once."""
    assert text.count(after) == 1, after
    start = text.index(after) + len(after)
    return text[:start] + new + text[text.index(before, start) :]


def main() -> int:
    """Writes or checks the stub; returns the exit status."""
    text = old = STUB.read_text()
    settings, sizes = "fastcoll/settings.def", "csrc/cpu/algorithms/tuning.def"
    text = place(text, "unless it is torch's default.\n", "        tuning:", described(settings))
    text = place(text, "    timeout: timedelta\n", "    tuning:", typed(settings))
    text = place(text, "timedelta = ...,\n        *,\n", "        tuning:", arguments(settings))
    text = place(text, "have the same sizes.\n\n    Attributes:\n", '    """\n', described(sizes))
    start = text.index('    """\n\n', text.index("have the same sizes.")) + len('    """\n\n')
    text = text[:start] + typed(sizes) + text[text.index("\n    def __init__", start) :]
    if text == old:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{STUB.relative_to(ROOT)} differs from the .def files: run `make format`")
        return 1
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
