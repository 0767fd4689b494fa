"""A companion: a process beside a rank, in which a backend lives that cannot live in the rank.

Several MPIs do not fit into one process, and each is started by a launcher of its own. A companion loads the
backend as any rank would, and then does what its rank says, a line at a time. It measures with the functions
that a rank measures with, and while it is not spoken to it sleeps in a read. Its rank meets the other ranks on
its behalf, right before it says "turn": so a companion that died keeps nobody from meeting.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastcoll.bench.candidate import Candidate
from fastcoll.bench.channel import Channel, connect, exit_with, problem_of
from fastcoll.bench.collectives import build_case
from fastcoll.bench.control import Control
from fastcoll.bench.options import DTYPES
from fastcoll.bench.peer import Peer

__all__ = ["main"]


class _Companion:
    """Answers the requests of a rank; each public method is one.

    Args:
        peer: The backend.
        control: Of the companions of all ranks.
    """

    def __init__(self, peer: Peer, control: Control) -> None:
        self._peer = peer
        self._control = control
        self._candidate: Candidate | None = None

    def prepare(self, collective: str, size: int, dtype: str, op: str, root: int) -> None:
        self._candidate = None  # before its successor is allocated
        case = build_case(
            collective,
            size,
            DTYPES[dtype],
            op,
            self._control.rank,
            self._control.world_size,
            root,
            torch.device("cpu"),
        )
        self._candidate = self._peer.prepare(case)

    def verify(self, first_seed: int, times: int) -> int:
        return self._prepared.verify(first_seed, times)

    def clear(self) -> None:
        self._prepared.clear()

    def turn(self, warmup: int, calls: int) -> list[float]:
        return self._prepared.turn(lambda: None, warmup, calls)

    def cpu_seconds(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._candidate = None
        self._peer.close()

    @property
    def _prepared(self) -> Candidate:
        if self._candidate is None:
            raise RuntimeError("no case is prepared")
        return self._candidate


def _answer(channel: Channel, act: Callable[[], Any]) -> bool:
    try:
        channel.send({"result": act()})
    except Exception as error:
        channel.send({"problem": problem_of(error)})
        return False
    return True


def _join(name: str, seconds: float) -> Control:
    timeout = timedelta(seconds=seconds)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    return Control(PrefixStore(f"companions/{name}", store), rank, world_size)


def main(name: str, peer_path: str, address: str, rank_variables: str, seconds: str) -> int:
    """Is the companion of one rank.

    Args:
        name: Of the backend.
        peer_path: Its class, as ``module:class``.
        address: Of the ranks; that of rank r ends with ``.r``.
        rank_variables: Environment variables, separated by commas, the first of which that is set is the rank.
        seconds: Limit of the start, and of a call where the backend has one.

    Returns:
        The exit status.
    """
    rank = next(os.environ[key] for key in rank_variables.split(",") if key in os.environ)
    os.environ["RANK"] = rank
    channel = connect(f"{address}.{rank}")
    end_is_expected = exit_with(channel)
    torch.set_num_threads(1)
    made: list[_Companion] = []

    def load() -> str:
        module, _, member = peer_path.partition(":")
        control = _join(name, float(seconds))
        peer = getattr(importlib.import_module(module), member)(
            name, control, timedelta(seconds=float(seconds))
        )
        made.append(_Companion(peer, control))
        return str(peer.library)

    if not _answer(channel, load):
        return 1
    while True:
        request, *arguments = channel.receive()
        if request == "close":
            end_is_expected.set()
        _answer(channel, lambda: getattr(made[0], request)(*arguments))  # noqa: B023
        if request == "close":
            return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
