"""Which of the ranks that share a host have died: known at once, and without the store."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from types import TracebackType

__all__ = ["Lives"]


class Lives:
    """Processes of this host, by descriptors that become readable when one ends, also before it is waited for.

    Where there are none (before Linux 5.3, in a sandbox, or a Python built without them) nobody is known to have died.
    """

    def __init__(self) -> None:
        self._ended: list[int] = []
        self._ranks: dict[int, int] = {}  # by descriptor
        self._poll = select.poll()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Looks at these from now on.

        Args:
            pids: Process ids by rank, as this process's namespace has them.
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
