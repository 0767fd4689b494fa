"""Ring all-reduce, reduce-scatter and all-gather: preparation. `_ring` has the kernel, its formula, bytes and bound."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from fastcoll.buckets import GRAIN
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, PAIRS
from fastcoll.kernels._peer_launch import (
    REGISTERS,
    Table,
    arithmetic,
    configuration_of,
    pack,
    types_of,
)
from fastcoll.kernels._ring import ring_kernel
from fastcoll.kernels.peers import PeerBuffers

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = [
    "configurations",
    "prepare_all_gather",
    "prepare_all_reduce",
    "prepare_reduce_scatter",
]


_one = functools.partial(
    configuration_of, kernel=ring_kernel, divisible_by_16=frozenset({"slot_bytes"})
)


@functools.cache
def _reducing() -> Table:
    return {
        (message, wire): _one(
            f"ring {types_of(message, wire)}",
            MESSAGE=ELEMENT[message],
            WIRE=ELEMENT[wire],
            REDUCES=True,
            BLOCK=8192 // wire.itemsize,
        )
        for message, wire in PAIRS
    }


@functools.cache
def _gathering() -> dict[int, Configuration]:
    """Returns the configurations that move items, by item size in bytes."""
    return {
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


def configurations() -> Iterator[Configuration]:
    """Yields all configurations that the functions of this module can launch."""
    yield from _reducing().values()
    yield from _gathering().values()


def prepare_all_reduce(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> CUDA.Launch:
    """Returns a launch that reduces `source` of all ranks into `out` of all ranks.

    The arguments are those of ``staged.one_shot.prepare_all_reduce``. The wire dtype is that of results: partial
    results travel in float32.

    Raises:
        RuntimeError: The buffers are closed.
    """
    count = source.numel()
    chunk = -(-count // (peers.world_size * GRAIN)) * GRAIN
    return _reduce(
        (source, out),
        peers,
        (op, scale, wire_dtype),
        (count, chunk, chunk),
        2 * peers.world_size - 2,
    )


def prepare_reduce_scatter(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> CUDA.Launch:
    """Returns a launch that reduces `source` of all ranks; rank r gets chunk r.

    `source` has as many chunks as there are ranks. `out` is one chunk, and may be this rank's chunk of `source`. The
    rest is as for ``prepare_all_reduce``; `wire_dtype` is the dtype to which the result is rounded.

    Raises:
        RuntimeError: The buffers are closed.
    """
    return _reduce(
        (source, out),
        peers,
        (op, scale, wire_dtype),
        (source.numel(), out.numel(), 0),
        peers.world_size - 1,
    )


def prepare_all_gather(source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers) -> CUDA.Launch:
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
    return _packed(
        _gathering()[item],
        (source, out),
        peers,
        programs,
        (chunk * peers.world_size, chunk, 0, chunk, segment // item),
        (peers.world_size - 1, 2 * peers.world_size - 2),
        arithmetic("sum", 1.0, peers),
        addresses % 16 == 0 and size % (4 * GRAIN) == 0,
    )


def _reduce(
    tensors: tuple[torch.Tensor, torch.Tensor],
    peers: PeerBuffers,
    call: tuple[str, float, torch.dtype | None],
    geometry: tuple[int, int, int],
    last: int,
) -> CUDA.Launch:
    """Returns the launch of steps 0 to `last`; `geometry` is count, chunk, and the stride of results, in elements."""
    source, out = tensors
    op, scale, wire_dtype = call
    count, chunk, out_stride = geometry
    segment, programs = _segments(peers, chunk, 4, GRAIN)
    return _packed(
        _reducing()[source.dtype, wire_dtype or source.dtype],
        tensors,
        peers,
        programs,
        (count, chunk, chunk, out_stride, segment),
        (0, last),
        arithmetic(op, scale, peers),
        (source.data_ptr() | out.data_ptr()) % 16 == 0 and chunk % GRAIN == 0,
    )


def _segments(peers: PeerBuffers, chunk: int, item_bytes: int, grain: int) -> tuple[int, int]:
    """Returns the size of a segment and the number of programs.

    Small chunks are spread over the channels; large ones use segments as large as a slot.
    """
    channels = peers.layout.channels
    largest = peers.layout.slot_bytes // item_bytes // grain * grain
    segment = max(grain, min(largest, -(-chunk // (channels * grain)) * grain))
    return segment, min(channels, -(-chunk // segment))


def _packed(
    configuration: Configuration,
    tensors: tuple[torch.Tensor, torch.Tensor],
    peers: PeerBuffers,
    programs: int,
    geometry: tuple[int, ...],
    steps: tuple[int, int],
    numbers: tuple[int, int],
    aligned: bool,
) -> CUDA.Launch:
    slots = (peers.layout.slots, peers.layout.slot_bytes)
    arguments = (*geometry, *slots, *steps, *numbers, peers.limit, int(aligned))
    return pack(configuration, peers, programs, tensors, arguments)
