"""Ring all-reduce, reduce-scatter and all-gather: the calls. `_ring` has the kernel, its formula, bytes and bound."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton.language as tl

from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, accumulate_dtype, dtype_name
from fastcoll.kernels._peer_checks import GRAIN, Chunk, Message
from fastcoll.kernels._peer_launch import (
    REGISTERS,
    WARPS,
    PreparedCollective,
    compiler_options,
    double_bits,
    pack,
    signature_of,
)
from fastcoll.kernels._prepared import at_once
from fastcoll.kernels._ring import ring_kernel
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "all_gather",
    "all_reduce",
    "configurations",
    "prepare_all_gather",
    "prepare_all_reduce",
    "prepare_reduce_scatter",
    "reduce_scatter",
]

_ITEM = {4: tl.int32, 1: tl.uint8}


@functools.cache
def _reducing(
    message: torch.dtype, wire: torch.dtype, partial: torch.dtype, every_rank: bool
) -> Configuration:
    types = dtype_name(message) + (f"->{dtype_name(wire)}" if wire != message else "")
    words = [types, f"partials {dtype_name(partial)}"]
    if every_rank:
        words.append("every rank")
    return Configuration(
        name=f"ring {' '.join(words)}",
        kernel=ring_kernel,
        signature=signature_of(ring_kernel),
        constexprs={
            "MESSAGE": ELEMENT[message],
            "PARTIAL": ELEMENT[partial],
            "WIRE": ELEMENT[wire],
            "ACCUMULATE": ELEMENT[accumulate_dtype(message)],
            "REDUCES": True,
            "EVERY_RANK": every_rank,
            "BLOCK": 8192 // wire.itemsize,
        },
        divisible_by_16=frozenset({"slot_bytes"}),
        num_warps=WARPS,
        options=compiler_options(every_rank),
    )


@functools.cache
def _gathering(item_bytes: int) -> Configuration:
    item = _ITEM[item_bytes]
    return Configuration(
        name=f"ring gather {item_bytes}-byte items",
        kernel=ring_kernel,
        signature=signature_of(ring_kernel),
        constexprs={
            "MESSAGE": item,
            "PARTIAL": item,
            "WIRE": item,
            "ACCUMULATE": item,
            "REDUCES": False,
            "EVERY_RANK": False,
            "BLOCK": 2048,
        },
        divisible_by_16=frozenset({"slot_bytes"}),
        num_warps=WARPS,
        wide=item_bytes == 4,
        options={"maxnreg": REGISTERS},
    )


def configurations() -> Iterator[Configuration]:
    """Yields all that the functions of this module can launch, and what plays all ranks."""
    for message, wire in PAIRS:
        for partial in dict.fromkeys((accumulate_dtype(message), wire)):
            yield _reducing(message, wire, partial, False)
    for dtype in (torch.float32, torch.bfloat16):
        yield _reducing(dtype, dtype, dtype, True)
    yield _gathering(4)
    yield _gathering(1)


def prepare_all_reduce(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    channels: int | None = None,
    _every_rank: torch.Tensor | None = None,
) -> PreparedCollective:
    """Returns a launch that reduces `source` of all ranks into `out` of all ranks.

    Args:
        source: This rank's message: contiguous, any number of elements, equal on all ranks; float32, float16,
            bfloat16, float64.
        out: Like `source`; may be `source` itself.
        peers: The ranks' buffers.
        op: "sum", "avg", "min", "max" or "product".
        scale: The result is multiplied by it before it is rounded.
        wire_dtype: What results travel in; None for the dtype of `source`, float16 or bfloat16 for float32.
        partial_dtype: What partial results travel in: float32 (for float64 messages float64), or the wire dtype,
            which is rounded to in every step; None for the wire dtype.
        channels: Programs; None for as many as there are segments, up to what the layout has.

    Raises:
        TypeError, ValueError: An argument cannot be.
        RuntimeError: The buffers are closed.
    """
    message = Message.of(source, out, peers, op, scale, wire_dtype)
    chunk = -(-message.count // (peers.world_size * GRAIN)) * GRAIN
    last = 2 * peers.world_size - 2
    return _reduce(
        message, peers, partial_dtype, channels, (message.count, chunk, chunk, last), _every_rank
    )


def prepare_reduce_scatter(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    *,
    op: str = "sum",
    scale: float = 1.0,
    wire_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    channels: int | None = None,
    _every_rank: torch.Tensor | None = None,
) -> PreparedCollective:
    """Returns a launch that reduces `source` of all ranks; each rank gets the chunk of its number.

    Args:
        source: As many chunks as there are ranks; otherwise as for :func:`prepare_all_reduce`.
        out: One chunk; may be this rank's chunk of `source`.
        peers: As for :func:`prepare_all_reduce`.
        op: As for :func:`prepare_all_reduce`.
        scale: As for :func:`prepare_all_reduce`.
        wire_dtype: What the result is rounded to, as in :func:`prepare_all_reduce`.
        partial_dtype: As for :func:`prepare_all_reduce`.
        channels: As for :func:`prepare_all_reduce`.

    Raises:
        TypeError, ValueError: An argument cannot be.
        RuntimeError: The buffers are closed.
    """
    message = Message.of(source, out, peers, op, scale, wire_dtype, source_chunks=peers.world_size)
    count, last = source.numel(), peers.world_size - 1
    return _reduce(
        message, peers, partial_dtype, channels, (count, message.count, 0, last), _every_rank
    )


def prepare_all_gather(
    source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers, *, channels: int | None = None
) -> PreparedCollective:
    """Returns a launch that gathers `source` of all ranks into `out` of all ranks, in rank order.

    Args:
        source: This rank's chunk: contiguous, any dtype, any number of elements, equal on all ranks.
        out: As many chunks as there are ranks; `source` may be this rank's chunk of it.
        peers: The ranks' buffers.
        channels: Programs; None for as many as there are segments, up to what the layout has.

    Raises:
        TypeError, ValueError: An argument cannot be.
        RuntimeError: The buffers are closed.
    """
    moved = Chunk.of(source, out, peers)
    configuration = _gathering(moved.item_bytes)
    chunk = moved.bytes // moved.item_bytes
    # In bytes: what a rank's alignment allows must not change where its segments begin.
    segment, programs = _segments(peers, moved.bytes, 1, 4 * GRAIN, channels)
    return _packed(
        configuration,
        (source, out),
        peers,
        programs,
        None,
        (chunk * peers.world_size, chunk, 0, chunk, segment // moved.item_bytes),
        (peers.world_size - 1, 2 * peers.world_size - 2),
        (0, double_bits(1.0), 1),
        moved.aligned,
    )


all_reduce = at_once(prepare_all_reduce)
reduce_scatter = at_once(prepare_reduce_scatter)
all_gather = at_once(prepare_all_gather)


def _reduce(
    message: Message,
    peers: PeerBuffers,
    partial_dtype: torch.dtype | None,
    channels: int | None,
    geometry: tuple[int, int, int, int],
    every_rank: torch.Tensor | None,
) -> PreparedCollective:
    count, chunk, out_stride, last = geometry
    partial = message.wire if partial_dtype is None else partial_dtype
    accumulate = accumulate_dtype(message.source.dtype)
    if partial not in (accumulate, message.wire):
        raise ValueError(
            f"partial_dtype: expected {accumulate} or {message.wire}, got {partial}. Correct the argument."
        )
    item_bytes = max(partial.itemsize, message.wire.itemsize)
    segment, programs = _segments(peers, chunk, item_bytes, GRAIN, channels)
    every = every_rank is not None
    configuration = _reducing(message.source.dtype, message.wire, partial, every)
    if every and configuration.name not in [each.name for each in configurations()]:
        raise ValueError(
            f"the launch of every rank: expected aligned float32 or bfloat16 throughout, got "
            f"{configuration.name}. Correct the argument."
        )
    return _packed(
        configuration,
        (message.source, message.out),
        peers,
        programs,
        every_rank,
        (count, chunk, chunk, out_stride, segment),
        (0, last),
        (message.op, double_bits(message.scale), message.divisor),
        message.aligned,
    )


def _segments(
    peers: PeerBuffers, chunk: int, item_bytes: int, grain: int, channels: int | None
) -> tuple[int, int]:
    """Returns the size of a segment and the number of programs.

    Small chunks are spread over the channels; large ones go in segments as large as a slot.

    Raises:
        ValueError: The caller asks for more channels than there are.
    """
    layout = peers.layout
    most = layout.channels if channels is None else channels
    if not 1 <= most <= layout.channels:
        raise ValueError(
            f"channels: expected 1 to {layout.channels}, got {channels}. Correct the argument."
        )
    largest = layout.slot_bytes // item_bytes // grain * grain
    segment = max(grain, min(largest, -(-chunk // (most * grain)) * grain))
    return segment, min(most, -(-chunk // segment))


def _packed(
    configuration: Configuration,
    tensors: tuple[torch.Tensor, torch.Tensor],
    peers: PeerBuffers,
    programs: int,
    every_rank: torch.Tensor | None,
    geometry: tuple[int, ...],
    steps: tuple[int, int],
    arithmetic: tuple[int, int, int],
    aligned: bool,
) -> PreparedCollective:
    slots = (peers.layout.slots, peers.layout.slot_bytes)
    return pack(
        configuration,
        peers,
        programs,
        tensors,
        every_rank,
        peers.table,
        arguments=(*geometry, *slots, *steps, *arithmetic, peers.spins, int(aligned)),
    )
