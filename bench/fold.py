"""The sums of private deterministic backends: ``gloo-fold``, ``nccl-fold``, and ``fastcoll-fold`` in shared memory.

They are the peer of ``order="fixed"``. Phases, on all ranks:

1. gather the whole messages of all ranks, by the backend before the hyphen
2. add them by a tree over the ranks, with torch's additions; 16-bit types in float32, with one rounding

Bytes on the wire: each rank sends n - 1 messages, in all three collectives. A ring sends 2 (n - 1)/n messages in
all_reduce, and (n - 1)/n in reduce_scatter. So these are n/2 and n times as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from fastcoll._measure import Call
from fastcoll.bench.collectives import COLLECTIVES, Case
from fastcoll.bench.peer import Peer, bind

__all__ = ["FoldPeer", "fold"]

_SERVED = ("all_reduce", "reduce_scatter", "reduce")


def fold(terms: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors, in the first of them; those on the left of an addition are overwritten.

    The tree splits n terms at the largest power of two below n, as fastcoll's does.
    """
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return fold(terms[:middle]).add_(fold(terms[middle:]))


class FoldPeer(Peer):
    """An all-gather of another backend, and a fold of what it has gathered."""

    def __init__(self, name: str, timeout: timedelta) -> None:
        super().__init__(name, timeout)
        self.library = f"all_gather of {self.library}, and torch's additions"

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Checks for the backend that gathers."""
        return super().missing(name.removesuffix("-fold"), device)

    @property
    def trains(self) -> bool:
        """Never: no process group of torch does this."""
        return False

    def bind(self, case: Case) -> Call:
        """Returns a call that gathers and adds; calls share one buffer of all ranks' messages.

        Raises:
            NotImplementedError: The call is no sum or average of floating-point numbers.
        """
        name, op, dtype = case.collective.name, case.op, case.dtype
        if name not in _SERVED or op not in ("sum", "avg") or not dtype.is_floating_point:
            raise NotImplementedError(f"{self.name} has no {name} {op} of {dtype}")
        ranks, rank, receive = case.world_size, case.rank, case.receive
        buffer = case.send.new_empty(ranks * case.send.numel())
        gathering = replace(case, collective=COLLECTIVES["all_gather"], receive=buffer)
        gather = bind(gathering, self.group)
        first = rank * case.count if name == "reduce_scatter" else 0
        terms = buffer.view(ranks, -1)[:, first : first + case.count].unbind()
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        divisor = case.send.new_full((), ranks, dtype=wide)  # CUDA multiplies by 1 over a number
        wanted = name != "reduce" or rank == case.root

        def call() -> None:
            gather()
            if wanted:
                total = fold([term.to(wide) for term in terms])
                receive.copy_(total.div_(divisor) if op == "avg" else total)

        return call
