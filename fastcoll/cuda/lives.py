"""Detects dead ranks of the same host at once, without the store."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from types import TracebackType

__all__ = ["Lives"]


class Lives:
    """Processes of this host, watched by pidfds, which become readable when a process ends, even before it is reaped.

    Without pidfds (before Linux 5.3, in a sandbox, or in a Python built without them) no death is detected.
    """

    def __init__(self) -> None:
        self._ended: list[int] = []
        self._ranks: dict[int, int] = {}  # by descriptor
        self._poll = select.poll()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Adds processes to watch.

        Args:
            pids: Process ids by rank, in this process's pid namespace.
        """
        for rank, pid in pids.items():
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.append(rank)
                continue
            except (OSError, AttributeError):
                continue
            self._ranks[file] = rank
            self._poll.register(file, select.POLLIN)

    def dead(self) -> list[int]:
        """Returns the ranks whose processes have ended."""
        return sorted({*self._ended, *(self._ranks[file] for file, _ in self._poll.poll(0))})

    def __enter__(self) -> Lives:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._ranks:
            with contextlib.suppress(OSError):
                os.close(file)
        self._ranks.clear()
