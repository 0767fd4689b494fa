"""A defect of tests/mutants.py, written by hand: a reviewer could miss it, and the tests must find it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes:
        name: Name of the defect.
        room: Its part of the project.
        file: Its file, relative to the root.
        old: Text that occurs once in the file.
        new: The replacement.
        tests: Files or tests of the short tier that are likely to find it.
        reason: Why the short tier may miss it; "" if it must not.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""
