"""Triton kernels: the arithmetic around a collective on CUDA tensors. Installed as fastcoll.kernels.

    flatten.py    many tensors into one flat bucket, scaled and cast: Flatten
    unflatten.py  the way back, optionally accumulating: Unflatten
    reduce.py     k buffers, flat or scattered, into one: Reduce

    peers.py           memory that ranks map of each other: PeerLayout, PeerBuffers, PeerFault
    one_shot.py        all-reduce: every rank reads all messages
    two_shot.py        all-reduce: every rank reduces its share, then fetches the others
    bucket_all_reduce.py   the same of buckets, into the tensors
    ring.py            all-reduce, reduce-scatter, all-gather through slots of the right neighbour
    every_rank.py      one launch that plays all ranks, for timing on one GPU

    _blocks.py _move.py _dtypes.py _statistics.py   what kernels share inside
    _signals.py _exchange.py _pieces.py _ring.py _arithmetic.py _peer_checks.py _peer_launch.py
                                           the same of those between ranks
    _plan.py _sides.py _configuration.py _launch.py _prepared.py
                                           what launchers share: checks, tables, specialisations, the launch

Importing this package imports no Triton; using one of its names does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcoll.kernels._statistics import Statistics
    from fastcoll.kernels.flatten import Flatten
    from fastcoll.kernels.peers import PeerBuffers, PeerFault, PeerLayout
    from fastcoll.kernels.reduce import Reduce
    from fastcoll.kernels.unflatten import Unflatten

__all__ = [
    "Flatten",
    "PeerBuffers",
    "PeerFault",
    "PeerLayout",
    "Reduce",
    "Statistics",
    "Unflatten",
]

_HOMES = {
    "Flatten": "flatten",
    "PeerBuffers": "peers",
    "PeerFault": "peers",
    "PeerLayout": "peers",
    "Reduce": "reduce",
    "Statistics": "_statistics",
    "Unflatten": "unflatten",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastcoll.kernels' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"fastcoll.kernels.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise ImportError(
            f"fastcoll.kernels.{name}: expected Triton 3.6 or newer, got no Triton at all. A CUDA build of torch "
            "brings it; else pip install 'fastcoll[triton]'."
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
