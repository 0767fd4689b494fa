"""The backends that are compared, by the word of the command line.

A backend of ``torch.distributed`` needs no code; what is reached another way is one more class with the members of
:class:`~fastcoll.bench.peer.Peer`, and an entry in :data:`ADAPTERS`. What cannot be loaded on some rank is left out on
all of them, and named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch

from fastcoll.bench.control import Control
from fastcoll.bench.mpi import MpiPeer
from fastcoll.bench.peer import Peer, problem_of
from fastcoll.bench.torch_peer import FakePeer, SharedPeer, TorchPeer
from fastcoll.bench.training_peers import (
    BatchedPeer,
    CompressPeer,
    HookPeer,
    SynchronizerPeer,
    UnreducedPeer,
)

__all__ = ["ADAPTERS", "close_peers", "open_peers"]

ADAPTERS: Mapping[str, type[Peer]] = {
    "fake": FakePeer,
    "fastcoll-batched": BatchedPeer,
    "fastcoll-fused": HookPeer,
    "fastcoll-fused-bf16": HookPeer,
    "fastcoll-sync": SynchronizerPeer,
    "fastcoll-sync-bf16": SynchronizerPeer,
    "gloo-batched": BatchedPeer,
    "fastcoll-shared": SharedPeer,
    "mpi": MpiPeer,
    "nccl-batched": BatchedPeer,
    "nccl-bf16": CompressPeer,
    "unreduced": UnreducedPeer,
}
"""What is not simply a backend of torch, by the word of the command line."""


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
        adapter = adapters.get(name, TorchPeer)
        problem = _first(control, adapter.missing(name, device))
        if not problem:
            try:
                peers.append(adapter(name, control, timeout))
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
