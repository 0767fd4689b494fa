"""What a program of the ``script`` fixture has left."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ended", "Script"]


@dataclass(frozen=True)
class Ended:
    """A program that has ended: exit status, negative for a signal, and what it printed."""

    status: int
    stdout: str
    stderr: str


Script = Callable[..., Ended]
