"""The type of the ``script`` fixture."""

from collections.abc import Callable

from launcher import Ended

__all__ = ["Ended", "Script"]

Script = Callable[..., Ended]
