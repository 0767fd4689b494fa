"""From a call to a launch, for the kernels between ranks: checks, the choice of a configuration, the arguments."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastcoll.kernels._arithmetic import OPERATIONS
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, INTERPRETED, accumulate_dtype, dtype_name
from fastcoll.kernels._launch import launcher, require_device
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "GRAIN",
    "INTEGERS",
    "MESSAGE_DTYPES",
    "PAIRS",
    "REGISTERS",
    "REGISTERS_ALONE",
    "WARPS",
    "Choice",
    "Message",
    "Registered",
    "block_of",
    "bytes_of",
    "channels_for",
    "choices",
    "configuration_of",
    "double_bits",
    "launch",
    "overlaps",
    "require_tensors",
    "signature_of",
    "sizes",
    "staged_piece",
    "start",
]

GRAIN = 16
"""Pieces start at multiples of so many elements: 16 bytes and more of every dtype."""

PAIRS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
"""Dtypes of message and wire that go together."""

MESSAGE_DTYPES = tuple(dict.fromkeys(message for message, _ in PAIRS))

INTEGERS = [
    *("source", "out", "sources", "outs", "peers", "messages", "rank", "world", "channels"),
    *("count", "piece", "stage_bytes", "chunk", "source_stride", "out_stride"),
    *("segment", "slots", "slot_bytes", "first", "last", "op", "scale", "divisor", "spins"),
    "aligned",
]
"""Arguments that ``kernel[grid](...)`` must not turn into constants when they are 1."""

_INT32 = frozenset(
    {"rank", "world", "channels", "first", "last", "slots", "op", "divisor", "aligned"}
)
WARPS = 8
REGISTERS = 128
"""So many that two programs fit on a multiprocessor. Left to itself the assembler aims for more and spills."""

REGISTERS_ALONE = 224
"""For launches of at most one program on a multiprocessor."""

_BLOCK_BYTES = 32 * 32 * WARPS


@dataclass(frozen=True)
class Choice:
    """What decides which machine code runs.

    Attributes:
        message: Dtype of source and out.
        wire: Dtype that travels.
        staged: Whether the message is copied to the staging first; else it is read where it is.
        every_rank: Whether one launch plays all ranks.
    """

    message: torch.dtype
    wire: torch.dtype
    staged: bool
    every_rank: bool = False

    @property
    def name(self) -> str:
        """The choice in words, as a row of the compile table has it."""
        types = dtype_name(self.message)
        if self.wire != self.message:
            types += f"->{dtype_name(self.wire)}"
        return " ".join(
            [
                types,
                "staged" if self.staged else "direct",
                *(["every rank"] if self.every_rank else []),
            ]
        )


def choices(every_rank: bool) -> Iterator[Choice]:
    """Yields all choices of a kernel over staging.

    Args:
        every_rank: Whether there is a launch that plays all ranks.
    """
    for message, wire in PAIRS:
        yield Choice(message, wire, True)
        if message == wire:
            yield Choice(message, wire, False)
    if every_rank:
        for dtype in (torch.float32, torch.bfloat16):
            for staged in (True, False):
                yield Choice(dtype, dtype, staged, True)


def block_of(wire: torch.dtype) -> int:
    """Returns the elements of a block: 32 bytes of wire dtype for each thread."""
    return _BLOCK_BYTES // wire.itemsize


def signature_of(kernel: Any) -> dict[str, str]:
    """Returns the types of a kernel's integer arguments: all that are not written in capitals."""
    return {
        name: "i32" if name in _INT32 else "i64" for name in kernel.arg_names if not name.isupper()
    }


@functools.cache
def configuration_of(
    algorithm: str, kernel: Any, every_rank_kernel: Any, choice: Choice
) -> Configuration:
    """Returns the configuration for a choice; the same object for the same choice."""
    chosen = every_rank_kernel if choice.every_rank else kernel
    return Configuration(
        name=f"{algorithm} {choice.name}",
        kernel=chosen,
        signature=signature_of(chosen),
        constexprs={
            "MESSAGE": ELEMENT[choice.message],
            "WIRE": ELEMENT[choice.wire],
            "ACCUMULATE": ELEMENT[accumulate_dtype(choice.message)],
            "STAGED": choice.staged,
            "BLOCK": block_of(choice.wire),
        },
        divisible_by_16=frozenset({"stage_bytes"}),
        num_warps=WARPS,
        options={"maxnreg": REGISTERS_ALONE if choice.every_rank else REGISTERS},
    )


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
        require_tensors(source, out, peers)
        known = ", ".join(map(str, MESSAGE_DTYPES))
        _require("source's dtype", source.dtype in MESSAGE_DTYPES, known, source.dtype)
        wire = source.dtype if wire_dtype is None else wire_dtype
        _require(
            "wire_dtype",
            (source.dtype, wire) in PAIRS,
            [str(w) for m, w in PAIRS if m == source.dtype],
            wire,
        )
        _require("op", op in OPERATIONS, f"one of {sorted(OPERATIONS)}", op)
        count = sizes(source, out, source_chunks, out_chunks)
        overlaps(source, out, count, peers.rank, source_chunks, out_chunks)
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

    def choice(self, registered: Registered | None, every_rank: bool) -> Choice:
        """Returns what to launch for this call.

        Raises:
            ValueError: The message cannot be read where it is.
        """
        if registered is not None:
            _require(
                "registered: wire dtype",
                self.wire == self.source.dtype,
                "that of source",
                self.wire,
            )
            _require(
                "registered: alignment",
                self.aligned,
                f"source, out and chunks that start at multiples of 16 bytes and of {GRAIN} elements",
                f"addresses {hex(self.source.data_ptr())}, {hex(self.out.data_ptr())}, count {self.count}",
            )
        choice = Choice(self.source.dtype, self.wire, registered is None, every_rank)
        names = [each.name for each in choices(every_rank)]
        _require("the kinds of launches", choice.name in names, names, choice.name)
        return choice


def require_tensors(source: torch.Tensor, out: torch.Tensor, peers: PeerBuffers) -> None:
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
        _require(name, tensor.is_contiguous(), "a contiguous tensor", tuple(tensor.stride()))
        _require(f"{name}'s device", tensor.device == peers.device, peers.device, tensor.device)
    require_device(source.device, bool(INTERPRETED))
    _require("out's dtype", out.dtype == source.dtype, source.dtype, out.dtype)


def sizes(source: torch.Tensor, out: torch.Tensor, source_chunks: int, out_chunks: int) -> int:
    """Returns the elements of a chunk.

    Raises:
        ValueError: The sizes do not fit together.
    """
    count = source.numel() // source_chunks
    _require(
        "elements of source",
        source.numel() == count * source_chunks,
        f"a multiple of {source_chunks}",
        source.numel(),
    )
    _require("elements of out", out.numel() == count * out_chunks, count * out_chunks, out.numel())
    return count


def overlaps(
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
    _require(
        "out", apart or first == second, "memory of its own or the place in source", "an overlap"
    )


def bytes_of(
    source: torch.Tensor,
    out: torch.Tensor,
    peers: PeerBuffers,
    source_chunks: int = 1,
    out_chunks: int = 1,
) -> int:
    """Checks a call that moves bytes, of any dtype; returns the bytes of a chunk.

    Raises:
        TypeError: Something is no tensor.
        ValueError: A dtype, device, size or overlap that cannot be.
    """
    require_tensors(source, out, peers)
    count = sizes(source, out, source_chunks, out_chunks)
    overlaps(source, out, count, peers.rank, source_chunks, out_chunks)
    return count * source.element_size()


def channels_for(count: int, block: int, peers: PeerBuffers, channels: int | None) -> int:
    """Returns the number of programs: at most one per block, at most what the layout has.

    Raises:
        ValueError: The caller asks for more than there are.
    """
    most = peers.layout.channels
    if channels is not None:
        _require("channels", 1 <= channels <= most, f"1 to {most}", channels)
        most = channels
    return max(1, min(most, -(-count // block)))


def double_bits(value: float) -> int:
    """Returns the bits of a float64: an argument that loses nothing, whatever the accumulate dtype."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def launch(
    algorithm: str,
    kernel: Any,
    every_rank_kernel: Any,
    message: Message,
    peers: PeerBuffers,
    channels: int | None,
    registered: Registered | None,
    every_rank: tuple[int, int] | None = None,
    shares: int = 1,
    staged_chunks: int = 1,
) -> None:
    """Launches a kernel over staging, unless there is nothing to do.

    Args:
        algorithm: For the name of the configuration.
        kernel: What one rank runs.
        every_rank_kernel: What plays all ranks.
        message: The call.
        peers: The ranks' buffers.
        channels: Programs that the caller allows, or None.
        registered: The ranks' messages, if they are read where they are.
        every_rank: Addresses of the tables of sources and outs, if one launch plays all ranks.
        shares: Parts of a piece that each start at a multiple of GRAIN elements.
        staged_chunks: Pieces that are staged at a time.

    Raises:
        ValueError: The staging is too small for `shares` parts, or the number of channels cannot be.
    """
    if registered is not None:
        registered.require(message.source, peers)
    choice = message.choice(registered, every_rank is not None)
    configuration = configuration_of(algorithm, kernel, every_rank_kernel, choice)
    if message.count == 0:
        return
    programs = channels_for(message.count, block_of(message.wire), peers, channels)
    grain = GRAIN * shares
    piece = -(-message.count // (programs * grain)) * grain
    if registered is None:
        piece = min(piece, staged_piece(peers, message.wire.itemsize * staged_chunks, grain))
    start(
        configuration,
        peers,
        programs,
        (message.source, message.out),
        every_rank,
        peers.table.data_ptr(),
        peers.table.data_ptr() if registered is None else registered.table.data_ptr(),
        arguments=(
            message.count,
            piece,
            peers.layout.stage_bytes,
            message.op,
            double_bits(message.scale),
            message.divisor,
            peers.spins,
            int(message.aligned),
        ),
    )


def start(
    configuration: Configuration,
    peers: PeerBuffers,
    programs: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    every_rank: tuple[int, int] | None,
    *tables: int,
    arguments: tuple[int, ...],
) -> None:
    """Launches what one rank runs, or with `every_rank` what all ranks run.

    Args:
        configuration: Of the one or the other.
        peers: The ranks' buffers.
        programs: Channels.
        tensors: Source and out of this rank.
        every_rank: Addresses of the tables of sources and outs, or None.
        tables: Addresses of further tables.
        arguments: Those that follow the number of channels.
    """
    run = launcher(configuration, peers.device)
    if every_rank is None:
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        ranks = (peers.rank, peers.world_size)
        run(programs, *addresses, *tables, *ranks, programs, *arguments)
    else:
        grid = programs * peers.world_size
        run(grid, *every_rank, *tables, peers.world_size, programs, *arguments)


def staged_piece(peers: PeerBuffers, element_bytes: int, grain: int) -> int:
    """Returns how many elements of that size fit into a half of a channel's staging.

    Raises:
        ValueError: Not even `grain` of them do.
    """
    most = peers.layout.stage_bytes // element_bytes // grain * grain
    needed = f"at least {grain * element_bytes}"
    _require("the layout's stage_bytes", most > 0, needed, peers.layout.stage_bytes)
    return most


def _require(name: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}. Correct the argument.")
