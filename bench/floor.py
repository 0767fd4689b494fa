"""The least memory traffic of any backend, as a call that is timed beside the backends.

All ranks do their parts at the same time, on the buffers of the collective, without sending or waiting. The
rest of a backend's time is its communication:

    all_reduce                             reads and writes its buffer once, in place
    all_gather, all_to_all, sendrecv       writes its result, reading as many bytes
    reduce_scatter                         reads all its chunks, writes one
    broadcast, scatter                     all but the root write their result, reading as many bytes
    reduce, gather                         the root reads as much as all ranks send, and writes its result

Memory of this rank, of the same size, replaces the chunks of other ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastcoll._measure import Call
from fastcoll.bench.collectives import Case

__all__ = ["bind_floor"]


def _words(tensor: Tensor) -> Tensor:
    """Returns a view as the widest integers that fit, because torch moves these at memory speed."""
    return tensor.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)


def _nothing() -> None:
    pass


def _sum_into(receive: Tensor, parts: list[Tensor]) -> None:
    torch.add(parts[0], parts[-1], out=receive)
    for part in parts[1:-1]:
        receive.add_(part)


def bind_floor(case: Case) -> Call | None:
    """Returns the call with this rank's least memory traffic of a case; None for a barrier, which moves no bytes."""
    name, ranks, is_root = case.collective.name, case.world_size, case.rank == case.root
    if name == "barrier":
        return None
    receive = _words(case.receive)
    if name == "all_reduce":
        return partial(receive.add_, 0)
    if name == "reduce_scatter":
        parts = [_words(chunk) for chunk in case.send.chunk(ranks)]
        return partial(_sum_into, receive, parts)
    if name == "reduce":
        if not is_root:
            return _nothing
        return partial(
            _sum_into, receive, [receive, *(torch.ones_like(receive) for _ in range(ranks - 1))]
        )
    takes_part = {"broadcast": not is_root, "scatter": not is_root, "gather": is_root}
    if not takes_part.get(name, True):
        return _nothing
    return partial(receive.copy_, torch.ones_like(receive))
