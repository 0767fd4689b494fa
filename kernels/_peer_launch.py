"""From a call to a launch, for the kernels between ranks: configurations, pieces, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import dtype_name
from fastcoll.kernels._launch import prepared
from fastcoll.kernels._plan import double_bits
from fastcoll.kernels.peers import PeerBuffers

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = [
    "OPTIONS",
    "REGISTERS",
    "WARPS",
    "Table",
    "arithmetic",
    "block_of",
    "configuration_of",
    "pack",
    "types_of",
]

_INT32 = frozenset({"rank", "world", "channels", "first", "last", "slots", "divisor", "aligned"})
WARPS = 8
REGISTERS = 128
"""Limit by which two programs fit on a multiprocessor. Without it the assembler aims for more programs and spills."""

OPTIONS: dict[str, object] = {
    "maxnreg": REGISTERS,
    "enable_fp_fusion": False,  # the default differs between releases; a fused sum rounds differently
}
"""Compiler options of kernels that reduce: the number of registers, and no fused sums."""

_BLOCK_BYTES = 32 * 32 * WARPS

Table = Mapping[tuple[torch.dtype, torch.dtype], Configuration]


def block_of(message: torch.dtype, wire: torch.dtype) -> int:
    """Returns the elements of a block: for each thread 32 bytes of the wider dtype.

    Counted in a narrower wire dtype a block would have twice the elements, and some releases of Triton would spill.
    """
    return _BLOCK_BYTES // max(message.itemsize, wire.itemsize)


def configuration_of(
    name: str,
    kernel: Any,
    *,
    divisible_by_16: frozenset[str] = frozenset(),
    wide: bool = True,
    options: Mapping[str, object] = OPTIONS,
    **constexprs: object,
) -> Configuration:
    """Returns a configuration of a kernel whose integer arguments are those without a name in capitals."""
    integers = (argument for argument in kernel.arg_names if not argument.isupper())
    return Configuration(
        name=name,
        kernel=kernel,
        signature={argument: "i32" if argument in _INT32 else "i64" for argument in integers},
        constexprs=constexprs,
        divisible_by_16=divisible_by_16,
        num_warps=WARPS,
        wide=wide,
        options=options,
    )


def types_of(first: torch.dtype, second: torch.dtype) -> str:
    """Returns two dtypes as text, in the form of the compile table's rows."""
    return dtype_name(first) + (f"->{dtype_name(second)}" if second != first else "")


def arithmetic(op: str, scale: float, peers: PeerBuffers) -> tuple[int, int]:
    """Returns the bits of the factor, and the divisor."""
    return double_bits(scale), peers.world_size if op == "avg" else 1


def pack(
    configuration: Configuration,
    peers: PeerBuffers,
    programs: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    arguments: tuple[int, ...],
    **places: Any,
) -> CUDA.Launch:
    """Returns the launch of one rank.

    Args:
        configuration: The configuration.
        peers: The ranks' buffers.
        programs: Channels; 0 to launch nothing.
        tensors: This rank's source and out.
        arguments: The kernel's arguments after the number of channels.
        places: As for ``prepared``.

    Raises:
        RuntimeError: The buffers are closed.
    """
    peers.require_open()
    source, out = tensors
    return prepared(
        configuration,
        peers.device,
        programs,
        (
            *(source.data_ptr(), out.data_ptr(), peers.table.data_ptr()),
            *(peers.rank, peers.world_size, programs, *arguments),
        ),
        peers,
        source_at=0,
        out_at=1,
        **places,
    )
