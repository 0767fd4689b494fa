"""How many programs the groups of this process may have waiting on one device at the same time.

A kernel that waits for its peers occupies half a multiprocessor for each of its programs until the peers arrive. If
waiting kernels of several groups held every multiprocessor, an NCCL kernel that a peer waits for could not start: a
deadlock. So the groups share a budget, and each group takes half of what is left.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

__all__ = ["BUDGET", "ChannelShare"]

BUDGET = 64
"""Programs on a device, at most. In the worst case each has its own multiprocessor; an H100 has 132."""

_lock = threading.Lock()
_taken: Counter[torch.device] = Counter()


def _budget(device: torch.device) -> int:
    """Returns the programs that may wait on a device; half of its multiprocessors stay for NCCL."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return BUDGET
    return min(BUDGET, torch.cuda.get_device_properties(device).multi_processor_count // 2)


class ChannelShare:
    """The programs of one group on a device.

    Args:
        device: The device.
        most: Programs that the group can use.

    Attributes:
        programs: How many the group may have: at most half of those that were left.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        with _lock:
            self.programs = min(most, (_budget(device) - _taken[device]) // 2)
            _taken[device] += self.programs

    def agree(self, programs: int) -> None:
        """Reduces the share to `programs`, because another rank has no more."""
        with _lock:
            _taken[self._device] += programs - self.programs
            self.programs = programs

    def close(self) -> None:
        """Gives the whole share back; call it when the group's kernels have ended or never ran."""
        self.agree(0)
