"""From a checked call to a launch, for the kernels between ranks: configurations, pieces, arguments."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, accumulate_dtype, dtype_name
from fastcoll.kernels._launch import Launcher, launcher
from fastcoll.kernels._peer_checks import GRAIN, Message, Registered, expect
from fastcoll.kernels._prepared import PreparedLaunch
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "INTEGERS",
    "REGISTERS",
    "WARPS",
    "Choice",
    "PreparedCollective",
    "block_of",
    "channels_for",
    "choices",
    "compiler_options",
    "configuration_of",
    "double_bits",
    "pack",
    "prepare",
    "signature_of",
    "staged_piece",
]

INTEGERS = [
    *("source", "out", "peers", "messages", "rank", "world", "channels"),
    *("count", "piece", "stage_bytes", "chunk", "source_stride", "out_stride"),
    *("segment", "slots", "slot_bytes", "first", "last", "op", "scale", "divisor", "spins"),
    *("block_map", "sizes", "blocks", "buckets", "bucket_row", "output_row", "shares"),
    "aligned",
]
"""Arguments that ``kernel[grid](...)`` must not turn into constants when they are 1."""

_INT32 = frozenset(
    {"rank", "world", "channels", "first", "last", "slots", "op", "divisor", "shares", "aligned"}
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


def compiler_options(every_rank: bool) -> dict[str, object]:
    """Returns what the compiler is told of kernels that reduce: how many registers there are, and to fuse no sums."""
    return {
        "maxnreg": REGISTERS_ALONE if every_rank else REGISTERS,
        "enable_fp_fusion": False,  # the default differs between releases; a fused sum is rounded otherwise
    }


@functools.cache
def _known(every_rank: bool) -> frozenset[Choice]:
    return frozenset(choices(every_rank))


def block_of(message: torch.dtype, wire: torch.dtype) -> int:
    """Returns the elements of a block: for each thread 32 bytes of the wider dtype.

    By a narrower wire the elements would be twice as many, and with some releases of Triton the registers spill.
    """
    return _BLOCK_BYTES // max(message.itemsize, wire.itemsize)


def signature_of(kernel: Any) -> dict[str, str]:
    """Returns the types of a kernel's integer arguments: all that are not written in capitals."""
    return {
        name: "i32" if name in _INT32 else "i64" for name in kernel.arg_names if not name.isupper()
    }


@functools.cache
def configuration_of(algorithm: str, kernel: Any, choice: Choice) -> Configuration:
    """Returns the configuration for a choice; the same object for the same choice."""
    return Configuration(
        name=f"{algorithm} {choice.name}",
        kernel=kernel,
        signature=signature_of(kernel),
        constexprs={
            "MESSAGE": ELEMENT[choice.message],
            "WIRE": ELEMENT[choice.wire],
            "ACCUMULATE": ELEMENT[accumulate_dtype(choice.message)],
            "STAGED": choice.staged,
            "EVERY_RANK": choice.every_rank,
            "BLOCK": block_of(choice.message, choice.wire),
        },
        divisible_by_16=frozenset({"stage_bytes"}),
        num_warps=WARPS,
        options=compiler_options(choice.every_rank),
    )


def channels_for(count: int, block: int, peers: PeerBuffers, channels: int | None) -> int:
    """Returns the number of programs: at most one per block, at most what the layout has; 0 for nothing.

    Raises:
        ValueError: The caller asks for more than there are.
    """
    most = peers.layout.channels
    if channels is not None:
        expect("channels", 1 <= channels <= most, f"1 to {most}", channels)
        most = channels
    return min(most, -(-count // block))


def double_bits(value: float) -> int:
    """Returns the bits of a float64: an argument that loses nothing, whatever the accumulate dtype."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _choice(message: Message, registered: Registered | None, every_rank: bool) -> Choice:
    """Returns what to launch for this call.

    Raises:
        ValueError: The message cannot be read where it is.
    """
    if registered is not None:
        expect(
            "registered: wire dtype",
            message.wire == message.source.dtype,
            "that of source",
            message.wire,
        )
        expect(
            "registered: alignment",
            message.aligned,
            f"source, out and chunks that start at multiples of 16 bytes and of {GRAIN} elements",
            f"addresses {hex(message.source.data_ptr())}, {hex(message.out.data_ptr())}, count {message.count}",
        )
    choice = Choice(message.source.dtype, message.wire, registered is None, every_rank)
    known = _known(every_rank)
    if choice not in known:
        expect("the kinds of launches", False, sorted(each.name for each in known), choice.name)
    return choice


class PreparedCollective(PreparedLaunch):
    """One launch of a kernel between ranks with everything checked and packed: calling it launches.

    It can be repeated, and captured in a graph, among any other launches on the same buffers, as flags and counters
    lie on the device; after a fault it touches nothing until they are reset, like any launch. It holds the buffers.
    """

    __slots__ = ("_peers", "_spins")

    def __init__(
        self,
        run: Launcher,
        grid: int,
        arguments: tuple[int, ...],
        held: object,
        peers: PeerBuffers,
        place: int = 0,
    ) -> None:
        super().__init__(run, grid, arguments, held, place=place)
        self._peers = peers
        self._spins = peers.spins

    def __call__(self, *addresses: int) -> None:
        """Launches.

        Args:
            addresses: As for :class:`PreparedLaunch`.

        Raises:
            RuntimeError: The current stream is not the one on which this was prepared, the buffers are closed, or
                their limit of polls is another one by now.
        """
        peers = self._peers
        if peers.closed or peers.spins != self._spins:
            self._refuse()
        super().__call__(*addresses)

    def _refuse(self) -> None:
        self._peers.require_open()
        raise RuntimeError(
            f"fastcoll.kernels: expected the limit of {self._spins} polls with which this launch was prepared, got "
            f"{self._peers.spins}. Prepare it again."
        )


def prepare(
    algorithm: str,
    kernel: Any,
    message: Message,
    peers: PeerBuffers,
    channels: int | None,
    registered: Registered | None,
    every_rank: torch.Tensor | None = None,
    shares: int = 1,
    staged_chunks: int = 1,
) -> PreparedCollective:
    """Returns the launch of a kernel over staging; it launches nothing if there is nothing to do.

    Args:
        algorithm: For the name of the configuration.
        kernel: What runs.
        message: The call.
        peers: The ranks' buffers.
        channels: Programs that the caller allows, or None.
        registered: The ranks' messages, if they are read where they are.
        every_rank: Addresses of all ranks' sources and outs, as for :func:`pack`, if one launch plays all ranks.
        shares: Parts of a piece that each start at a multiple of GRAIN elements.
        staged_chunks: Pieces that are staged at a time.

    Raises:
        RuntimeError: The buffers are closed.
        ValueError: The staging is too small for `shares` parts, or the number of channels cannot be.
    """
    if registered is not None:
        registered.require(message.source, peers)
    choice = _choice(message, registered, every_rank is not None)
    programs = channels_for(
        message.count, block_of(message.source.dtype, message.wire), peers, channels
    )
    grain = GRAIN * shares
    piece = -(-message.count // (max(programs, 1) * grain)) * grain
    if registered is None:
        piece = min(piece, staged_piece(peers, message.wire.itemsize * staged_chunks, grain))
    return pack(
        configuration_of(algorithm, kernel, choice),
        peers,
        programs,
        (message.source, message.out),
        every_rank,
        peers.table,
        peers.table if registered is None else registered.table,
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


def pack(
    configuration: Configuration,
    peers: PeerBuffers,
    programs: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    every_rank: torch.Tensor | None,
    *tables: torch.Tensor,
    arguments: tuple[int, ...],
) -> PreparedCollective:
    """Returns the launch of what one rank runs, or with `every_rank` of what all ranks run.

    Args:
        configuration: Of the one or the other.
        peers: The ranks' buffers.
        programs: Channels; 0 to launch nothing.
        tensors: Source and out of this rank.
        every_rank: Addresses of all ranks' sources and outs: int64 [2, world size] on the device, contiguous; or None.
        tables: Further tables on the device.
        arguments: Those that follow the number of channels.

    Raises:
        RuntimeError: The buffers are closed.
    """
    peers.require_open()
    first, second = tensors if every_rank is None else every_rank
    grid = programs if every_rank is None else programs * peers.world_size
    return PreparedCollective(
        launcher(configuration, peers.device),
        grid,
        (
            *(first.data_ptr(), second.data_ptr()),
            *(table.data_ptr() for table in tables),
            *(peers.rank, peers.world_size, programs, *arguments),
        ),
        (every_rank, *tables),
        peers,
    )


def staged_piece(peers: PeerBuffers, element_bytes: int, grain: int) -> int:
    """Returns how many elements of that size fit into a half of a channel's staging.

    Raises:
        ValueError: Not even `grain` of them do.
    """
    most = peers.layout.stage_bytes // element_bytes // grain * grain
    needed = f"at least {grain * element_bytes}"
    expect("the layout's stage_bytes", most > 0, needed, peers.layout.stage_bytes)
    return most
