"""What leaves a host over its network for a call, as its kernel counts, beside what no algorithm can do without."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fastcoll._measure import Control

__all__ = ["bytes_sent", "count_hosts", "least_bytes"]


def count_hosts(control: Control) -> int:
    """Returns on how many hosts the ranks are: machines, or network namespaces of one."""
    return len(
        set(control.all_gather(f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"))
    )


def least_bytes(call: str, message: int, hosts: int) -> float | None:
    """Returns the bytes that the busiest host must send; None where that hangs on who has the message.

    Args:
        call: The collective.
        message: Its bytes; of reduce_scatter, all_gather and all_to_all the whole. "send" is from the first rank
            to the last and back, "exchange" between the two both ways at once.
        hosts: How many.
    """
    share = (hosts - 1) / hosts
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "exchange": 1.0}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather"), share)
    return factors[call] * message if call in factors else None


def bytes_sent() -> int:
    """Returns the bytes that this host has sent so far, on all interfaces but the loopback's."""
    sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            sent += int(counts.split()[8])
    return sent
