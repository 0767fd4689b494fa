"""What is checked of a call of a kernel between ranks, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastcoll.kernels._arithmetic import OPERATIONS
from fastcoll.kernels._dtypes import INTERPRETED, PAIRS
from fastcoll.kernels._launch import require_device
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "GRAIN",
    "MESSAGE_DTYPES",
    "Chunk",
    "Message",
    "Registered",
    "expect",
]

GRAIN = 16
"""Pieces start at multiples of so many elements: 16 bytes and more of every dtype."""

MESSAGE_DTYPES = tuple(dict.fromkeys(message for message, _ in PAIRS))


@dataclass(frozen=True)
class Registered:
    """The addresses of all ranks' messages, in memory that this rank's device maps.

    Attributes:
        addresses: In rank order, multiples of 16.
        table: The same as int64 [world size] on the device.
    """

    addresses: tuple[int, ...]
    table: torch.Tensor

    @classmethod
    def at(cls, addresses: Sequence[int], device: torch.device | str) -> Registered:
        """Returns the table for messages at these addresses.

        Raises:
            ValueError: An address is no multiple of 16.
        """
        for peer, address in enumerate(addresses):
            if address == 0 or address % 16:
                raise ValueError(
                    f"address of rank {peer}'s message: expected a multiple of 16, got {hex(address)}. "
                    "Align the message, or call without `registered`."
                )
        return cls(tuple(addresses), torch.tensor(addresses, dtype=torch.int64, device=device))

    def require(self, source: torch.Tensor, peers: PeerBuffers) -> None:
        """Checks that the own message is `source`.

        Raises:
            ValueError: It is not, or the number of addresses is not that of ranks.
        """
        if len(self.addresses) != peers.world_size:
            raise ValueError(
                f"registered: expected {peers.world_size} addresses, got {len(self.addresses)}. "
                "Give that of every rank."
            )
        if source.numel() and self.addresses[peers.rank] != source.data_ptr():
            raise ValueError(
                f"registered: expected this rank's message at {hex(source.data_ptr())}, got "
                f"{hex(self.addresses[peers.rank])}. Register the tensor that is reduced."
            )


@dataclass(frozen=True)
class Message:
    """The checked arguments of a call.

    Attributes:
        source: What this rank gives.
        out: What it gets.
        count: Elements of the unit that is split into pieces: the message, or for reduce-scatter and all-gather a
            rank's chunk.
        wire: Dtype that travels.
        op: Number of the operation.
        scale: Factor of the result.
        divisor: Divisor of the result: the number of ranks for an average, else 1.
        aligned: Whether source, out and their pieces start at multiples of 16 bytes.
    """

    source: torch.Tensor
    out: torch.Tensor
    count: int
    wire: torch.dtype
    op: int
    scale: float
    divisor: int
    aligned: bool

    @classmethod
    def of(
        cls,
        source: torch.Tensor,
        out: torch.Tensor,
        peers: PeerBuffers,
        op: str = "sum",
        scale: float = 1.0,
        wire_dtype: torch.dtype | None = None,
        source_chunks: int = 1,
        out_chunks: int = 1,
    ) -> Message:
        """Checks a call.

        Args:
            source: As the caller gave it.
            out: As the caller gave it.
            peers: The ranks' buffers.
            op: "sum", "avg", "min", "max" or "product".
            scale: Factor of the result.
            wire_dtype: Dtype that travels, or None for that of `source`.
            source_chunks: Number of chunks that `source` has.
            out_chunks: Number of chunks that `out` has.

        Raises:
            TypeError: Something is no tensor.
            ValueError: A dtype, device, size or overlap that cannot be.
        """
        _require_tensors(source, out, peers)
        wire = source.dtype if wire_dtype is None else wire_dtype
        if (source.dtype, wire) not in PAIRS:
            known = ", ".join(map(str, MESSAGE_DTYPES))
            expect("source's dtype", source.dtype in MESSAGE_DTYPES, known, source.dtype)
            wires = [str(w) for m, w in PAIRS if m == source.dtype]
            expect("wire_dtype", False, wires, wire)
        if op not in OPERATIONS:
            expect("op", False, f"one of {sorted(OPERATIONS)}", op)
        count = _chunk_elements(source, out, source_chunks, out_chunks)
        _refuse_overlap(source, out, count, peers.rank, source_chunks, out_chunks)
        aligned = source.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
        if source_chunks != 1 or out_chunks != 1:
            aligned = aligned and count % GRAIN == 0
        return cls(
            source,
            out,
            count,
            wire,
            OPERATIONS[op],
            scale,
            peers.world_size if op == "avg" else 1,
            aligned,
        )


def _require_tensors(source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers) -> None:
    """Checks what every call asks of its tensors.

    Raises:
        TypeError: Something is no tensor.
        ValueError: A tensor is elsewhere than the buffers or not contiguous, or the dtypes differ.
    """
    for name, tensor in (("source", source), ("out", out)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name}: expected a tensor, got {type(tensor).__name__}. Correct the argument."
            )
        expect(name, tensor.is_contiguous(), "a contiguous tensor", tuple(tensor.stride()))
        expect(f"{name}'s device", tensor.device == peers.device, peers.device, tensor.device)
    require_device(source.device, bool(INTERPRETED))
    expect("out's dtype", out.dtype == source.dtype, source.dtype, out.dtype)


def _chunk_elements(
    source: torch.Tensor, out: torch.Tensor, source_chunks: int, out_chunks: int
) -> int:
    """Returns the elements of a chunk.

    Raises:
        ValueError: The sizes do not fit together.
    """
    count = source.numel() // source_chunks
    expect(
        "elements of source",
        source.numel() == count * source_chunks,
        f"a multiple of {source_chunks}",
        source.numel(),
    )
    expect("elements of out", out.numel() == count * out_chunks, count * out_chunks, out.numel())
    return count


def _refuse_overlap(
    source: torch.Tensor,
    out: torch.Tensor,
    count: int,
    rank: int,
    source_chunks: int,
    out_chunks: int,
) -> None:
    """Checks that source and out are apart, or that the one is the own chunk of the other.

    Raises:
        ValueError: They overlap otherwise.
    """
    first, second = source.data_ptr(), out.data_ptr()
    if source_chunks > out_chunks:
        first += rank * count * source.element_size()
    elif out_chunks > source_chunks:
        second += rank * count * out.element_size()
    apart = (
        source.data_ptr() + source.nbytes <= out.data_ptr()
        or out.data_ptr() + out.nbytes <= source.data_ptr()
    )
    expect(
        "out", apart or first == second, "memory of its own or the place in source", "an overlap"
    )


@dataclass(frozen=True)
class Chunk:
    """The checked arguments of an all-gather, which moves bytes of any dtype.

    Attributes:
        bytes: Size of a rank's chunk.
        item_bytes: Of an item that is moved as one: 4, or 1 where sizes or addresses allow no more.
        aligned: Whether source, out and all chunks of it start at multiples of 16 bytes and of GRAIN items.
    """

    bytes: int
    item_bytes: int
    aligned: bool

    @classmethod
    def of(cls, source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers) -> Chunk:
        """Checks a call.

        Raises:
            TypeError: Something is no tensor.
            ValueError: A dtype, device, size or overlap that cannot be.
        """
        _require_tensors(source, out, peers)
        ranks = peers.world_size
        count = _chunk_elements(source, out, 1, ranks)
        _refuse_overlap(source, out, count, peers.rank, 1, ranks)
        size = count * source.element_size()
        addresses = source.data_ptr() | out.data_ptr()
        return cls(
            size,
            4 if (size | addresses) % 4 == 0 else 1,
            addresses % 16 == 0 and size % (4 * GRAIN) == 0,
        )


def expect(name: str, holds: bool, expected: object, got: object) -> None:
    """Raises unless `holds`.

    Raises:
        ValueError: With what was expected and what came.
    """
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}. Correct the argument.")
