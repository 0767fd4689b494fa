"""How many programs the groups of this process may have waiting on one device at the same time.

A kernel that waits for its peers keeps half a multiprocessor for each of its programs until the peers come. If the
kernels of several groups held a part of all of them, a kernel of NCCL that a peer waits for could not start, and nobody
would go on. So the groups share a budget: each takes half of what is left, until nothing is.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

__all__ = ["BUDGET", "Share"]

BUDGET = 64
"""Programs on a device: in the worst case each is on a multiprocessor of its own, of which an H100 has 132."""

_lock = threading.Lock()
_taken: Counter[torch.device] = Counter()


class Share:
    """The programs of one group on a device.

    Args:
        device: Which.
        most: Programs that the group has a use for.

    Attributes:
        programs: How many it may have: at most half of those that were left.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        with _lock:
            self.programs = min(most, (BUDGET - _taken[device]) // 2)
            _taken[device] += self.programs

    def agree(self, programs: int) -> None:
        """Keeps only so many, since another rank has no more."""
        with _lock:
            _taken[self._device] += programs - self.programs
            self.programs = programs

    def close(self) -> None:
        """Gives all back, when the group's kernels have ended or never run."""
        self.agree(0)
