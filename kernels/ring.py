"""Ring all-reduce, reduce-scatter and all-gather: preparation. `_ring` has the kernel, its formula, bytes and bound."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton.language as tl

from fastcoll.buckets import GRAIN
from fastcoll.kernels._configuration import REGISTERS, Configuration, configuration_of
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, types_of
from fastcoll.kernels._launch import Launch, arithmetic, pack
from fastcoll.kernels._ring import ring_kernel
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "configurations",
    "prepare_all_gather",
    "prepare_all_reduce",
    "prepare_reduce_scatter",
]


_one = functools.partial(
    configuration_of, kernel=ring_kernel, divisible_by_16=frozenset({"slot_bytes"})
)


_REDUCING = {
    (message, wire): _one(
        f"ring {types_of(message, wire)}",
        MESSAGE=ELEMENT[message],
        WIRE=ELEMENT[wire],
        REDUCES=True,
        BLOCK=8192 // wire.itemsize,
    )
    for message, wire in PAIRS
}
_GATHERING = {
    size: _one(
        f"ring gather {size}-byte items",
        wide=size == 4,
        options={"maxnreg": REGISTERS},
        MESSAGE=item,
        WIRE=item,
        REDUCES=False,
        BLOCK=2048,
    )
    for size, item in ((4, tl.int32), (1, tl.uint8))
}
"""The configurations that move items, by item size in bytes."""


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that the functions of this module can launch."""
    yield from (*_REDUCING.values(), *_GATHERING.values())


def prepare_all_reduce(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> Launch:
    """Returns a launch that reduces `source` of all ranks into `out` of all ranks.

    The arguments are those of ``staged.one_shot.prepare_all_reduce``. The wire dtype is that of results: partial
    results travel in float32.

    Raises:
        RuntimeError: The buffers are closed.
    """
    count = source.numel()
    chunk = -(-count // (peers.world_size * GRAIN)) * GRAIN
    last = 2 * peers.world_size - 2
    return _reduce(source, out, peers, (count, chunk, chunk), last, op, scale, wire_dtype)


def prepare_reduce_scatter(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> Launch:
    """Returns a launch that reduces `source` of all ranks; rank r gets chunk r.

    `source` has as many chunks as there are ranks. `out` is one chunk, and may be this rank's chunk of `source`. The
    rest is as for ``prepare_all_reduce``; `wire_dtype` is the dtype to which the result is rounded.

    Raises:
        RuntimeError: The buffers are closed.
    """
    geometry = (source.numel(), out.numel(), 0)
    return _reduce(source, out, peers, geometry, peers.world_size - 1, op, scale, wire_dtype)


def prepare_all_gather(source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers) -> Launch:
    """Returns a launch that gathers `source` of all ranks into `out` of all ranks, in rank order.

    Args:
        source: This rank's chunk: contiguous, any dtype, any number of elements, equal on all ranks.
        out: As many chunks as there are ranks; `source` may be this rank's chunk of it.
        peers: The ranks' buffers.

    Raises:
        RuntimeError: The buffers are closed.
    """
    size, addresses = source.nbytes, source.data_ptr() | out.data_ptr()
    item = 4 if (size | addresses) % 4 == 0 else 1
    # In bytes, because a rank's alignment must not change where its segments begin.
    segment, programs = _segments(peers, size, 1, 4 * GRAIN)
    chunk = size // item
    arguments = (
        *(chunk * peers.world_size, chunk, 0, chunk, segment // item),
        *(peers.layout.slots, peers.layout.slot_bytes),
        *(peers.world_size - 1, 2 * peers.world_size - 2),
        *(*arithmetic("sum", 1.0, peers), peers.limit),
        int(addresses % 16 == 0 and size % (4 * GRAIN) == 0),
    )
    return pack(_GATHERING[item], peers, programs, (source, out), arguments)


def _reduce(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    geometry: tuple[int, int, int],
    last: int,
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
) -> Launch:
    """Returns the launch of steps 0 to `last`; `geometry` is count, chunk, and the stride of results, in elements."""
    count, chunk, out_stride = geometry
    segment, programs = _segments(peers, chunk, 4, GRAIN)
    aligned = (source.data_ptr() | out.data_ptr()) % 16 == 0 and chunk % GRAIN == 0
    arguments = (
        *(count, chunk, chunk, out_stride, segment),
        *(peers.layout.slots, peers.layout.slot_bytes, 0, last),
        *(*arithmetic(op, scale, peers), peers.limit, int(aligned)),
    )
    configuration = _REDUCING[source.dtype, wire_dtype or source.dtype]
    return pack(configuration, peers, programs, (source, out), arguments)


def _segments(peers: PeerBuffers, chunk: int, item_bytes: int, grain: int) -> tuple[int, int]:
    """Returns the size of a segment and the number of programs.

    Small chunks are spread over the channels; large ones use segments as large as a slot.
    """
    channels = peers.layout.channels
    largest = peers.layout.slot_bytes // item_bytes // grain * grain
    segment = max(grain, min(largest, -(-chunk // (channels * grain)) * grain))
    return segment, min(channels, -(-chunk // segment))
