"""Sizes of messages: read from a command line, written for readers, and swept. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

__all__ = ["parse_size", "size_text", "sizes"]

_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


def parse_size(text: str) -> int:
    """Returns the bytes that `text` names: ``4``, ``64K``, ``1.5M``, ``1G``; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: `text` is no size.
    """
    digits, unit = text.strip().upper().removesuffix("B").removesuffix("I"), 1
    if digits and digits[-1] in _UNITS:
        digits, unit = digits[:-1], _UNITS[digits[-1]]
    try:
        size = int(float(digits) * unit)
        if size >= 0:
            return size
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 4, 64K, 1M or 1G")


def size_text(size: int) -> str:
    """Returns bytes in the largest unit that divides them: ``64 KiB``."""
    for name, unit in _UNITS.items():
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}iB"
    return f"{size} B"


def sizes(least: int, most: int, factor: float) -> Iterator[int]:
    """Yields least, least x factor, ... up to most, in bytes."""
    size = least
    while size <= most:
        yield size
        size = max(size + 1, int(size * factor))
