"""The backends that are compared, by the word of the command line.

A backend of ``torch.distributed`` needs no code; what is reached another way is one more class with the members of
:class:`~fastcoll.bench.peer.Peer`, and an entry in :data:`ADAPTERS`. What cannot be loaded on some rank is left out on
all of them, and named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch

from fastcoll._measure import Control
from fastcoll.bench.mpi import MpiPeer
from fastcoll.bench.peer import FakePeer, Peer, SharedPeer, UnreducedPeer

__all__ = ["ADAPTERS", "close_peers", "open_peers", "problem_of"]

ADAPTERS: Mapping[str, type[Peer]] = {
    "fake": FakePeer,
    "fastcoll-shared": SharedPeer,
    "mpi": MpiPeer,
    "unreduced": UnreducedPeer,
}
"""What is not simply a backend of torch and a way to train."""


def problem_of(error: Exception) -> str:
    """Returns the first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def open_peers(
    names: tuple[str, ...],
    control: Control,
    device: torch.device,
    timeout: timedelta,
    adapters: Mapping[str, type[Peer]] = ADAPTERS,
) -> tuple[list[Peer], dict[str, str]]:
    """Connects the backends, in the order of the names.

    Returns:
        Those that all ranks have, and for the others the reason, the same on all ranks.
    """
    peers: list[Peer] = []
    reasons: dict[str, str] = {}
    for name in names:
        adapter = adapters.get(name, Peer)
        problem = _first(control, adapter.missing(name, device))
        if not problem:
            try:
                peers.append(adapter(name, timeout))
            except Exception as error:
                problem = problem_of(error)
            problem = _first(control, problem)
            if problem and peers and peers[-1].name == name:
                peers.pop().close()
        if problem:
            reasons[name] = problem
    return peers, reasons


def close_peers(peers: list[Peer]) -> None:
    """Disconnects all, the last one first."""
    while peers:
        peers.pop().close()


def _first(control: Control, problem: str) -> str:
    """Returns the first rank's problem, naming the rank if it is not that of all; "" if there is none."""
    problems = control.all_gather(problem)
    for rank, text in enumerate(problems):
        if text:
            return str(text) if all(problems) else f"rank {rank}: {text}"
    return ""
