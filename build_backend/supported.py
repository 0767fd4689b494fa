"""The releases of torch that fastcoll is made for: those that its test suite has run on, and the ones between."""

from __future__ import annotations

__all__ = ["MINORS", "PINNED", "RANGE", "minor_of", "problem", "requirement"]

MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
RANGE = "torch>=2.11,<2.16"

PINNED = "2.13"
"""The release that a build requires if no torch is installed; `make demo` uses it too."""


def minor_of(version: str) -> str:
    """Returns the minor release of a version of torch, in which c10d's binary interface is fixed: "2.13"."""
    return ".".join(version.split(".")[:2])


def requirement(version: str) -> str:
    """Returns the requirement of a build with this torch: c10d's binary interface is that of one minor release."""
    return f"torch=={minor_of(version)}.*"


def problem(version: str) -> str:
    """Returns the error about a torch that fastcoll is not made for, or ""."""
    if minor_of(version) in MINORS:
        return ""
    return (
        f"fastcoll is made for {RANGE} and found torch {version}: install one of these releases, "
        "then run `pip install --no-build-isolation .`"
    )
