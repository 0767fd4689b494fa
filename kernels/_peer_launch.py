"""From a call to a launch, for the kernels between ranks: configurations, pieces, arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from fastcoll.kernels._arithmetic import OPERATIONS
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, PAIRS, accumulate_dtype, dtype_name
from fastcoll.kernels._launch import Launcher, launcher
from fastcoll.kernels._plan import double_bits
from fastcoll.kernels._prepared import PreparedLaunch
from fastcoll.kernels.peers import PeerBuffers

__all__ = [
    "EVERY_RANK",
    "GRAIN",
    "INTEGERS",
    "REGISTERS",
    "WARPS",
    "PreparedCollective",
    "Table",
    "arithmetic",
    "block_of",
    "compiler_options",
    "pack",
    "prepare",
    "signature_of",
    "staged_table",
    "table_of",
    "types_of",
]

INTEGERS = [
    *("source", "out", "peers", "rank", "world", "channels"),
    *("count", "piece", "stage_bytes", "chunk", "source_stride", "out_stride"),
    *("segment", "slots", "slot_bytes", "first", "last", "op", "scale", "divisor", "spins"),
    *("block_map", "sizes", "blocks", "buckets", "bucket_row", "output_row", "shares"),
    "aligned",
]
"""Arguments that ``kernel[grid](...)`` must not specialise when they are 1."""

_INT32 = frozenset(
    {"rank", "world", "channels", "first", "last", "slots", "op", "divisor", "shares", "aligned"}
)
GRAIN = 16
"""Pieces start at multiples of so many elements: at least 16 bytes in every dtype."""

WARPS = 8
REGISTERS = 128
"""Limit by which two programs fit on a multiprocessor. Without it the assembler aims for more programs and spills."""

REGISTERS_ALONE = 224
"""For launches of at most one program on a multiprocessor."""

EVERY_RANK = (torch.float32, torch.bfloat16)
"""Message dtypes with a launch that runs all ranks."""

_BLOCK_BYTES = 32 * 32 * WARPS

Table = Mapping[tuple[torch.dtype, torch.dtype, bool], Configuration]


def compiler_options(every_rank: bool) -> dict[str, object]:
    """Returns the compiler options of kernels that reduce: the number of registers, and no fused sums."""
    return {
        "maxnreg": REGISTERS_ALONE if every_rank else REGISTERS,
        "enable_fp_fusion": False,  # the default differs between releases; a fused sum rounds differently
    }


def block_of(message: torch.dtype, wire: torch.dtype) -> int:
    """Returns the elements of a block: for each thread 32 bytes of the wider dtype.

    Counted in a narrower wire dtype a block would have twice the elements, and some releases of Triton would spill.
    """
    return _BLOCK_BYTES // max(message.itemsize, wire.itemsize)


def signature_of(kernel: Any) -> dict[str, str]:
    """Returns the types of a kernel's integer arguments: those whose names are not in capitals."""
    return {
        name: "i32" if name in _INT32 else "i64" for name in kernel.arg_names if not name.isupper()
    }


def types_of(first: torch.dtype, second: torch.dtype) -> str:
    """Returns two dtypes as text, in the form of the compile table's rows."""
    return dtype_name(first) + (f"->{dtype_name(second)}" if second != first else "")


def table_of(configuration: Any) -> Table:
    """Returns `configuration(message, wire, every_rank)` for all supported keys."""
    keys = [(message, wire, False) for message, wire in PAIRS]
    keys += [(dtype, dtype, True) for dtype in EVERY_RANK]
    return {key: configuration(*key) for key in keys}


@functools.cache
def staged_table(algorithm: str, kernel: Any) -> Table:
    """Returns the configurations of a kernel that uses staging."""

    def configuration(message: torch.dtype, wire: torch.dtype, every_rank: bool) -> Configuration:
        return Configuration(
            name=f"{algorithm} {types_of(message, wire)}" + " every rank" * every_rank,
            kernel=kernel,
            signature=signature_of(kernel),
            constexprs={
                "MESSAGE": ELEMENT[message],
                "WIRE": ELEMENT[wire],
                "ACCUMULATE": ELEMENT[accumulate_dtype(message)],
                "EVERY_RANK": every_rank,
                "BLOCK": block_of(message, wire),
            },
            divisible_by_16=frozenset({"stage_bytes"}),
            num_warps=WARPS,
            options=compiler_options(every_rank),
        )

    return table_of(configuration)


class PreparedCollective(PreparedLaunch):
    """One launch of a kernel between ranks with its arguments packed: calling it launches.

    It can be repeated, and captured in a graph, among any other launches on the same buffers, because flags and
    counters are on the device. After a fault it does nothing, like any launch. It holds the buffers.
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
        super().__init__(run, grid, arguments, held, place)
        self._peers = peers
        self._spins = peers.spins

    def __call__(self, *addresses: int) -> None:
        """Launches.

        Args:
            addresses: As for ``PreparedLaunch``.

        Raises:
            RuntimeError: The current stream is not the one on which this was prepared, the buffers are closed, or
                their limit of polls has changed.
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
    table: Table,
    tensors: tuple[torch.Tensor, torch.Tensor],
    peers: PeerBuffers,
    op: str,
    scale: float,
    wire_dtype: torch.dtype | None,
    every_rank: torch.Tensor | None,
    shares: int = 1,
) -> PreparedCollective:
    """Returns the launch of a kernel that uses staging; it launches nothing for an empty message.

    Args:
        table: The kernel's configurations.
        tensors: This rank's source and out.
        peers: The ranks' buffers.
        op: "sum", "avg", "min", "max" or "product".
        scale: Factor of the result.
        wire_dtype: Dtype that travels, or None for the message's dtype.
        every_rank: Addresses of all ranks' sources and outs, as for ``pack``, if one launch runs all ranks.
        shares: Number of parts of a piece, each of which starts at a multiple of GRAIN elements.

    Raises:
        RuntimeError: The buffers are closed.
    """
    source, out = tensors
    wire = wire_dtype or source.dtype
    programs = min(peers.layout.channels, -(-source.numel() // block_of(source.dtype, wire)))
    grain = GRAIN * shares
    piece = -(-source.numel() // (max(programs, 1) * grain)) * grain
    staged = peers.layout.stage_bytes // wire.itemsize // grain * grain
    return pack(
        table[source.dtype, wire, every_rank is not None],
        peers,
        programs,
        tensors,
        every_rank,
        (
            *(source.numel(), min(piece, staged), peers.layout.stage_bytes),
            *arithmetic(op, scale, peers),
            *(peers.spins, int((source.data_ptr() | out.data_ptr()) % 16 == 0)),
        ),
    )


def arithmetic(op: str, scale: float, peers: PeerBuffers) -> tuple[int, int, int]:
    """Returns the number of the operation, the bits of the factor, and the divisor."""
    return OPERATIONS[op], double_bits(scale), peers.world_size if op == "avg" else 1


def pack(
    configuration: Configuration,
    peers: PeerBuffers,
    programs: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    every_rank: torch.Tensor | None,
    arguments: tuple[int, ...],
) -> PreparedCollective:
    """Returns the launch for one rank, or with `every_rank` for all ranks.

    Args:
        configuration: The configuration for one rank or for all.
        peers: The ranks' buffers.
        programs: Channels; 0 to launch nothing.
        tensors: This rank's source and out.
        every_rank: Addresses of all ranks' sources and outs: int64 [2, world size] on the device, contiguous; or None.
        arguments: The kernel's arguments after the number of channels.

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
            *(first.data_ptr(), second.data_ptr(), peers.table.data_ptr()),
            *(peers.rank, peers.world_size, programs, *arguments),
        ),
        every_rank,
        peers,
    )
