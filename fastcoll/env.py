"""Every environment variable that fastcoll reads: name, type, default and meaning, from settings.def.

C++ reads them by itself, by csrc/base/settings.hpp. A variable that is set wins over the field of
``fastcoll.Options`` with the same meaning.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "VARIABLES", "Variable", "read", "unknown"]

GROUPS = ("Start here", "Several hosts", "Faults and trace", "Tuning", "CUDA")
"""Titles of the reference's parts, in its order."""


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: With the prefix.
        group: One of ``GROUPS``.
        default: Its value when it is not set; an int means that the variable is a whole number.
        meaning: One sentence, with the unit.
        allowed: The words it may hold, the least and the greatest number, or the most characters of any text.
    """

    name: str
    group: str
    default: str | int
    meaning: str
    allowed: tuple[Any, ...]

    @property
    def values(self) -> str:
        """The values it may hold, in a few words."""
        if isinstance(self.default, int):
            return f"{self.allowed[0]} to {self.allowed[1]}"
        return "text" if isinstance(self.allowed[0], int) else ", ".join(self.allowed)

    def parse(self, text: str) -> str | int:
        """Returns the value that `text` stands for.

        Raises:
            ValueError: It stands for none; the message says what would.
        """
        if isinstance(self.default, int):
            least, most = self.allowed
            with contextlib.suppress(ValueError):
                if least <= int(text) <= most:
                    return int(text)
            expected = f"an integer from {self.values}"
        elif isinstance(self.allowed[0], int):
            if len(text) <= self.allowed[0]:
                return text
            expected = f"{self.allowed[0]} characters at most"
        else:
            for choice in self.allowed:
                if choice.lower() == text.lower():
                    return str(choice)
            expected = f"one of {self.values}"
        raise ValueError(f"{self.name}={text}: expected {expected}. Correct or unset it.")


def _rows() -> Iterator[Variable]:
    """Reads settings.def: calls with literals, which C++ takes for macros."""
    text = Path(__file__).with_name("settings.def").read_text()
    for row in ast.parse(re.sub(r"^//.*", "", text, flags=re.MULTILINE)).body:
        assert isinstance(row, ast.Expr) and isinstance(row.value, ast.Call)
        kind, literals = ast.unparse(row.value.func), row.value.args[2:]
        name, group, default, *allowed, meaning = map(ast.literal_eval, literals)
        if kind == "SWITCH":
            allowed = [0, 1]
        elif kind == "CHOICE":
            (allowed,) = allowed
        yield Variable(name, group, default, meaning, tuple(allowed))


VARIABLES = tuple(_rows())


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns what each variable holds, by name; its default where it is unset or empty.

    Raises:
        ValueError: One holds what it may not; the message names it and says what it may hold.
    """
    return {
        one.name: one.parse(text) if (text := environ.get(one.name)) else one.default
        for one in VARIABLES
    }


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names that begin as ours do and mean nothing to us: most likely misspelt."""
    known = {variable.name for variable in VARIABLES}
    ours = {name for name in environ if name.startswith("FASTCOLL_")}
    return sorted(n for n in ours - known if not n.startswith("FASTCOLL_TEST_"))
