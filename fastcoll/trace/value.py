"""Values of a dump, each with its place in it, and checked as it is read.

Nothing in a file is believed: numbers have limits, text holds nothing that a terminal would obey, and what is
nested deeper than a dump is never walked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Value"]

_RANKS = re.compile(r"\[\s*(?:\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]")
_MOST_RANKS = 1 << 20


class Value:
    """Something in a dump.

    Every method raises ValueError, naming the place, if the value is of another kind.

    Args:
        value: what is there.
        place: where, as "entries[3].seq".
    """

    def __init__(self, value: Any, place: str) -> None:
        self._value, self.place = value, place

    def _fail(self, expected: str) -> ValueError:
        got = repr(self._value) if isinstance(self._value, (int, float, type(None))) else ""
        got = (got or type(self._value).__name__)[:40]
        return ValueError(f"expected {expected} as {self.place}, got {got}")

    def __getitem__(self, key: str) -> Value:
        """Returns the field of a dict."""
        if not isinstance(self._value, Mapping):
            raise self._fail("a dict")
        if key not in self._value:
            raise ValueError(f"{self.place} lacks {key}")
        return Value(self._value[key], key if self.place == "the dump" else f"{self.place}.{key}")

    def __contains__(self, key: str) -> bool:
        """Whether a dict has the field."""
        if not isinstance(self._value, Mapping):
            raise self._fail("a dict")
        return key in self._value

    def fields(self) -> Iterator[tuple[str, Value]]:
        """Yields keys and values of a dict."""
        if not isinstance(self._value, Mapping):
            raise self._fail("a dict")
        for key, value in self._value.items():
            name = Value(key, f"a key of {self.place}").text()
            yield name, Value(value, f"{self.place}.{name[:40]}")

    def items(self, length: int | None = None) -> list[Value]:
        """Returns the items of a list or tuple, of that length if one is given."""
        if not isinstance(self._value, (list, tuple)):
            raise self._fail("a list")
        if length is not None and len(self._value) != length:
            raise ValueError(f"expected {length} items in {self.place}, got {len(self._value)}")
        return [Value(item, f"{self.place}[{i}]") for i, item in enumerate(self._value)]

    def is_none(self) -> bool:
        """Whether it is None."""
        return self._value is None

    def flag(self) -> bool:
        """Returns a bool."""
        if not isinstance(self._value, bool):
            raise self._fail("a bool")
        return self._value

    def integer(self, least: int = -(1 << 63)) -> int:
        """Returns an integer of 64 bits, not below ``least``."""
        number = self._value
        if not isinstance(number, int) or isinstance(number, bool):
            raise self._fail("an integer")
        if not least <= number < 1 << 64:
            raise ValueError(f"{self.place} is out of range: {hex(number)[:40]}")
        return number

    def text(self, longest: int = 4096) -> str:
        """Returns a text, cut off after so many characters; what cannot be printed is a question mark."""
        if not isinstance(self._value, str):
            raise self._fail("a text")
        cut = self._value[:longest]
        if cut.isprintable():
            return cut
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in cut)

    def numbers(self) -> list[int]:
        """Returns the numbers of a text such as "[0, 2]"."""
        if not isinstance(self._value, str) or len(self._value) > 12 * _MOST_RANKS:
            raise self._fail('a list of ranks such as "[0, 1]"')
        if not _RANKS.fullmatch(self._value):
            raise self._fail('a list of ranks such as "[0, 1]"')
        return [int(word) for word in re.findall(r"\d+", self._value)]
