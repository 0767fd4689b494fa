"""The expected result of a collective, computed without communication.

Rank r sends a sequence of small integers that repeats with a prime period. So every rank can compute the
data of every other rank. A result that is shifted by a segment, or comes from another rank, does not match.
Sums of such small numbers are exact in every dtype; only an average may round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastcoll._measure import Call, synchronize
from fastcoll.bench.collectives import Case

__all__ = ["count_wrong", "fill", "pattern", "verify"]

PERIOD = 8191
_LARGEST = 3
_NOWHERE_SENT = 99


def pattern(seed: int, rank: int, dtype: torch.dtype, op: str) -> Tensor:
    """Returns one period of a rank's data, int64, [PERIOD].

    Args:
        seed: Seed of this verified call.
        rank: The sender.
        dtype: Dtype of the buffers: unsigned ones get no negative numbers.
        op: The reduction. For "prod" all numbers are 1 or 2, and 2 on the first three ranks only.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    least, most = (0 if not dtype.is_signed else -_LARGEST), _LARGEST
    if op == "prod":
        least, most = 1, 2 if rank < 3 else 1
    return torch.randint(least, most + 1, (PERIOD,), generator=generator)


def _reduced(seed: int, world_size: int, dtype: torch.dtype, op: str) -> Tensor:
    """Returns one period of the reduction of all ranks' data, int64, or float64 for "avg"."""
    sent = torch.stack([pattern(seed, rank, dtype, op) for rank in range(world_size)])
    if op == "avg":
        return sent.sum(0) / torch.tensor(world_size, dtype=torch.float64)
    if op in ("min", "max"):
        return sent.amin(0) if op == "min" else sent.amax(0)
    return sent.prod(0) if op == "prod" else sent.sum(0)


def fill(case: Case, seed: int) -> None:
    """Writes this rank's data, and fills a separate result with a number that no rank sends."""
    if case.receive is not case.send:
        case.receive.fill_(_NOWHERE_SENT)
    block = pattern(seed, case.rank, case.dtype, case.op).to(case.send)
    whole = case.send.numel() // PERIOD * PERIOD
    case.send[:whole].view(-1, PERIOD).copy_(block)
    case.send[whole:].copy_(block[: case.send.numel() - whole])


def _tolerance(case: Case) -> float:
    """Returns the allowed relative error; 0 if the sum of all ranks is exact in the dtype."""
    if not case.dtype.is_floating_point:
        return 0.0
    epsilon = torch.finfo(case.dtype).eps
    exact = case.op != "avg" and _LARGEST * case.world_size <= 1 / epsilon
    return 0.0 if exact or case.op in ("min", "max", "none") else case.world_size * epsilon


def _differences(actual: Tensor, expected: Tensor, tolerance: float) -> int:
    if tolerance == 0:
        return int((actual != expected).sum())
    error = (actual.double() - expected.double()).abs()
    return int((~(error <= tolerance * expected.double().abs())).sum())


def count_wrong(case: Case, seed: int) -> int:
    """Returns the number of wrong elements in this rank's result, after ``fill`` and a call."""
    wrong, tolerance, count = 0, _tolerance(case), case.count
    chunks = torch.split(case.receive, count) if case.expected else ()
    for actual, (source, chunk) in zip(chunks, case.expected, strict=True):
        block = (
            _reduced(seed, case.world_size, case.dtype, case.op)
            if source is None
            else pattern(seed, source, case.dtype, case.op)
        )
        block = block.to(case.receive).roll(-(chunk * count % PERIOD))
        whole = count // PERIOD * PERIOD
        wrong += _differences(actual[:whole].view(-1, PERIOD), block, tolerance)
        wrong += _differences(actual[whole:], block[: count - whole], tolerance)
    return wrong


def verify(case: Case, call: Call, first_seed: int, times: int) -> int:
    """Makes calls on data of the seeds from `first_seed` on; returns the number of this rank's wrong elements."""
    wrong = 0
    for seed in range(first_seed, first_seed + times):
        fill(case, seed)
        call()
        synchronize(case.send.device)
        wrong += count_wrong(case, seed)
    return wrong
