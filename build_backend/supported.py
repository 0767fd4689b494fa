"""Which releases of torch fastcoll is made for: those that its test suite has run on, and the ones between."""

from __future__ import annotations

__all__ = ["MINORS", "PINNED", "RANGE", "minor_of", "problem", "requirement"]

MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
RANGE = "torch>=2.11,<2.16"

PINNED = "2.13"
"""What a build asks for where no torch is installed, as `make demo` does."""


def minor_of(version: str) -> str:
    """Returns the part of a version of torch within which the binary interface of its c10d holds: "2.13"."""
    return ".".join(version.split(".")[:2])


def requirement(version: str) -> str:
    """Returns what a build with this torch can run with: c10d's binary interface is that of one minor release."""
    return f"torch=={minor_of(version)}.*"


def problem(version: str) -> str:
    """Returns the sentence about a torch that fastcoll is not made for, or ""."""
    if minor_of(version) in MINORS:
        return ""
    return (
        f"fastcoll is made for {RANGE} and found torch {version}: install one of these releases, "
        "then run `pip install --no-build-isolation .`"
    )
