"""What algorithms make plans of: addresses, a plan's context, steps, and launches between a list and its bucket."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastcoll._load_cuda import CUDA
from fastcoll.buckets import GRAIN, PIECE, BucketLayout
from fastcoll.cuda.algorithms.call import Call

if TYPE_CHECKING:
    from fastcoll.cuda.errors import Member
    from fastcoll.cuda.symmetric import PeerMemory

__all__ = [
    "NOTHING",
    "Issued",
    "Piece",
    "PlanContext",
    "Prepared",
    "bucket_bytes",
    "calls",
    "copy_in",
    "copy_out",
    "layout_of",
    "through_bucket",
]


class Piece(NamedTuple):
    """A tensor of this rank, by address.

    Attributes:
        source: Address of the input.
        out: Address of the result; may be `source`.
        elements: Input elements of this rank.
    """

    source: int
    out: int
    elements: int


class _DeviceArray:
    """Bytes on a CUDA device, by the protocol that torch reads."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor over `count` elements at an address; it owns no memory and keeps none alive.

    The device is the CPU if kernels are interpreted.
    """
    size = count * dtype.itemsize
    if not size:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_DeviceArray(address, size), device=device).view(dtype)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


@dataclass(frozen=True)
class PlanContext:
    """Where a plan runs: one group, one device, one stream, which is current.

    Attributes:
        member: This rank and the group.
        device: The device as kernels name it.
        peers: The peer-mapped memory, if there is any.
        workspace: Returns a tensor of at least so many bytes, for this stream; its user must hold it.
        squares: Of one call: where its sums of squares begin in the caller's, in bytes; None: it is not measured.
    """

    member: Member
    device: torch.device
    peers: PeerMemory | None
    workspace: Callable[[int], Tensor]
    squares: int | None = None

    def view(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory at an address as a tensor for kernels."""
        return _tensor_at(address, count, dtype, self.device)


class Prepared(NamedTuple):
    """A plan for a call, independent of the tensors' addresses.

    Attributes:
        steps: In this order. C++ replaces addresses in them by those of a call's input and result, or of tables on
            the device.
        tables: Whether the launches read the tensors' addresses from tables.
        held: An object that must live as long.
        of_count: Whether a single tensor must have this number of elements, not only this size class.
    """

    steps: tuple[CUDA.Launch | CUDA.PlannedCalls, ...]
    tables: bool = False
    held: object = None
    of_count: bool = True


Issued = tuple[str, torch.dtype, str, int, tuple[int, int], tuple[int, int]]
"""A call of NCCL: one of ``CUDA.COLLECTIVES``, dtype, one of ``CUDA.REDUCE_OPS`` or "", the other rank of a send or
receive (else -1), then address and elements of input and result; NOTHING: none."""

NOTHING = (0, 0)


def calls(
    every: Iterable[Issued], from_source: bool = False, to_out: bool = False
) -> CUDA.PlannedCalls:
    """Returns calls of NCCL as one step.

    With `from_source` the inputs' addresses are offsets in the call's input, with `to_out` the results' in its result.
    """
    operations = (*CUDA.REDUCE_OPS, "")
    numbers = [
        (
            CUDA.COLLECTIVES.index(what),
            CUDA.DTYPES.index(str(dtype).removeprefix("torch.")),
            operations.index(op),
            root,
            *given,
            *result,
        )
        for what, dtype, op, root, given, result in every
    ]
    return CUDA.PlannedCalls(numbers, from_source, to_out)


def bucket_bytes(sizes: Sequence[int], itemsize: int) -> int:
    """Returns an upper bound of a mapped bucket for tensors of these sizes, with gaps and sums of squares."""
    elements = sum(-(-size // GRAIN) for size in sizes) * GRAIN
    return elements * itemsize + sum(-(-size // PIECE) for size in sizes) * torch.float64.itemsize


@functools.lru_cache(maxsize=64)
def layout_of(sizes: tuple[int, ...]) -> BucketLayout:
    """Returns the layout of tensors of these sizes, the same on all ranks; it keeps its tables on devices."""
    return BucketLayout(sizes, GRAIN)


@functools.lru_cache(maxsize=128)
def _copier(
    kernel: str,
    sizes: tuple[int, ...],
    source: torch.dtype,
    target: torch.dtype,
    device: torch.device,
    **options: bool,
) -> Any:
    from fastcoll.kernels.flatten import Flatten, Unflatten

    made = {"flatten": Flatten, "unflatten": Unflatten}[kernel]
    return made(layout_of(sizes), source, target, device, **options)


def copy_in(
    pieces: Sequence[Piece], dtype: torch.dtype, bucket: Tensor, context: PlanContext
) -> CUDA.Launch:
    """Returns the launch that copies the tensors into a bucket, cast to the bucket's dtype."""
    sizes = tuple(piece.elements for piece in pieces)
    flatten = _copier("flatten", sizes, dtype, bucket.dtype, context.device)
    tensors = [context.view(piece.source, piece.elements, dtype) for piece in pieces]
    launch: CUDA.Launch = flatten.prepare(tensors, bucket)
    flatten.layout.read_here()
    return launch


def copy_out(
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    bucket: Tensor,
    context: PlanContext,
    scale: float = 1.0,
) -> CUDA.Launch:
    """Returns the launch that copies a bucket into the tensors, and measures them if the call is measured."""
    sizes = tuple(piece.elements for piece in pieces)
    measures = context.squares is not None
    unflatten = _copier("unflatten", sizes, bucket.dtype, dtype, context.device, measures=measures)
    tensors = [context.view(piece.out, piece.elements, dtype) for piece in pieces]
    launch: CUDA.Launch = unflatten.prepare(bucket, tensors, scale, context.squares or 0)
    unflatten.layout.read_here()
    return launch


def through_bucket(
    call: Call,
    pieces: Sequence[Piece],
    context: PlanContext,
    reduce: Callable[[int, int], CUDA.Launch | CUDA.PlannedCalls],
    scale: float = 1.0,
) -> Prepared:
    """Returns copy-in, the step that `reduce` makes of a bucket's address and elements, and copy-out times `scale`."""
    elements = layout_of(call.sizes).elements
    memory = context.workspace(elements * call.dtype.itemsize)
    address = memory.data_ptr()
    bucket = context.view(address, elements, call.dtype)
    steps = (
        copy_in(pieces, call.dtype, bucket, context),
        reduce(address, elements),
        copy_out(pieces, call.dtype, bucket, context, scale),
    )
    return Prepared(steps, tables=True, held=memory)
