"""The type of the ``script`` fixture."""

from collections.abc import Callable

from launcher import Ended

Script = Callable[..., Ended]
