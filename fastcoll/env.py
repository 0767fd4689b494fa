"""Every environment variable that fastcoll reads: name, type, default and meaning, from settings.def.

C++ reads them in csrc/base/settings.hpp. A variable that is set wins over the field of
``fastcoll.Options`` with the same meaning; only ``tuning`` wins over its variable.
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

__all__ = ["GROUPS", "SYMMETRIC_SWITCHES", "VARIABLES", "Variable", "read", "rows", "unknown"]

SYMMETRIC_SWITCHES = (
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)
"""torch's variables that csrc/cuda/bindings/symmetric.cpp changes for a while."""

GROUPS = ("Start here", "Several hosts", "Faults and trace", "Tuning", "CUDA")
"""Titles of the parts of the reference page, in order."""


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Name with the prefix.
        group: One of ``GROUPS``.
        default: Value if it is not set; an int if the variable is an integer.
        meaning: One sentence, with the unit.
        allowed: The allowed words, the least and the greatest number, or the greatest length of any text.
    """

    name: str
    group: str
    default: str | int
    meaning: str
    allowed: tuple[Any, ...]

    @property
    def values(self) -> str:
        """The allowed values, in a few words."""
        if isinstance(self.default, int):
            return f"{self.allowed[0]} to {self.allowed[1]}"
        return "text" if isinstance(self.allowed[0], int) else ", ".join(self.allowed)

    def parse(self, text: str) -> str | int:
        """Returns the value that `text` stands for.

        Raises:
            ValueError: It stands for none; the message has the allowed values.
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


def rows(path: Path) -> Iterator[tuple[str, list[str], list[Any]]]:
    """Yields macro, names and literals of each row of a .def file, whose rows are calls in Python's grammar too."""
    for row in ast.parse(re.sub(r"^//.*", "", path.read_text(), flags=re.MULTILINE)).body:
        assert isinstance(row, ast.Expr) and isinstance(row.value, ast.Call)
        given = row.value.args
        names = [one.id for one in given if isinstance(one, ast.Name)]
        literals = [ast.literal_eval(one) for one in given if not isinstance(one, ast.Name)]
        yield ast.unparse(row.value.func), names, literals


def _variables() -> Iterator[Variable]:
    for kind, _, literals in rows(Path(__file__).with_name("settings.def")):
        name, group, default, *allowed, meaning = literals
        if kind == "SWITCH":
            allowed = [0, 1]
        elif kind == "CHOICE":
            (allowed,) = allowed
        yield Variable(name, group, default, meaning, tuple(allowed))


VARIABLES = tuple(_variables())


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the value of each variable, by name; its default if it is unset or empty.

    Raises:
        ValueError: A value is not allowed; the message names the variable and the allowed values.
    """
    return {
        one.name: one.parse(text) if (text := environ.get(one.name)) else one.default
        for one in VARIABLES
    }


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names with fastcoll's prefix that are no variable of fastcoll, and most likely misspelt."""
    known = {variable.name for variable in VARIABLES}
    ours = {name for name in environ if name.startswith("FASTCOLL_")}
    return sorted(n for n in ours - known if not n.startswith("FASTCOLL_TEST_"))
