"""Sums of one rank with a factor, which NCCL before 2.29.7 leaves short of their last elements.

There NCCL runs one kernel, over all of the message, for AVG and PREMUL_SUM. It deals the message out to as many blocks
as it has 16 KiB, at most 32, in equal parts that it rounds down, so that what is left over is neither scaled nor copied
(NVIDIA/nccl#1950). A message that divides evenly is whole; so one that does not is called as two that do.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FIXED_IN", "whole_pieces"]

FIXED_IN = 22907
"""Version of NCCL, as ncclGetVersion has it."""

_BLOCK = 16 << 10  # bytes for which there is a block
_BLOCKS = 32  # at most
_PACK = 16  # bytes: parts are multiples of that


def whole_pieces(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields pieces of a message that NCCL's kernel does without a rest: where they begin, and their elements.

    Args:
        count: Elements of the message.
        itemsize: Bytes of an element: 1, 2, 4 or 8.
    """
    of_block, of_pack = _BLOCK // itemsize, _PACK // itemsize
    step = of_block if count < _BLOCKS * of_block else _BLOCKS * of_pack
    whole = count // step * step
    if whole:
        yield 0, whole
    if whole < count:
        yield whole, count - whole
