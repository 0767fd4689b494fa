"""Specialisations of kernels, which launchers choose and tests compile and compare, and the arguments of a launch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    *("OPTIONS", "REGISTERS", "UNFUSED", "Configuration"),
    *("block_of", "configuration_of", "double_bits"),
]

_INT32 = frozenset({"rank", "world", "channels", "first", "last", "slots", "divisor", "aligned"})
_WARPS = 8
REGISTERS = 128
"""Limit by which two programs fit on a multiprocessor. Without it the assembler aims for more programs and spills."""

UNFUSED: dict[str, object] = {
    "enable_fp_fusion": False  # the default differs between releases; a fused sum rounds differently
}
"""Compiler options of kernels that add or multiply: no fused sums."""

OPTIONS: dict[str, object] = {"maxnreg": REGISTERS, **UNFUSED}
"""Compiler options of kernels that reduce: the number of registers, and no fused sums."""

_BLOCK_BYTES = 32 * 32 * _WARPS


@dataclass(frozen=True, eq=False)
class Configuration:
    """Everything that determines the machine code of a launch.

    A launcher takes its configuration only from the table that ``configurations()`` of its module yields,
    so the tests compile every kernel that can run.

    Attributes:
        name: Name of the table's row, unique, such as "flatten float32->bfloat16".
        kernel: The ``@triton.jit`` function.
        signature: Triton's type of each argument that is no constexpr, in the order of the function's
            arguments: ``{"table": "*i64", "count": "i64"}``. An int argument keeps this type for any
            value, unlike in ``kernel[grid](...)``.
        constexprs: Value of each constexpr argument.
        divisible_by_16: Names of the arguments whose values are multiples of 16.
        num_warps: Warps of a program.
        wide: Whether the main loop must access global memory by 128 bits.
        options: Further compiler options, by name: ``{"maxnreg": 64}``.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible_by_16: frozenset[str] = frozenset()
    num_warps: int = 4
    wide: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    def attributes(self) -> dict[tuple[int, ...], list[list[object]]]:
        """Returns ``divisible_by_16`` in the form for Triton's ``ASTSource``.

        Raises:
            ValueError: A name is not an argument of the signature.
        """
        strangers = self.divisible_by_16 - set(self.signature)
        if strangers:
            raise ValueError(
                f"{self.name}: divisible_by_16 names {sorted(strangers)}, expected some of "
                f"{list(self.signature)}. Correct the configuration."
            )
        names = list(self.kernel.arg_names)
        return {
            (names.index(name),): [["tt.divisibility", 16]] for name in sorted(self.divisible_by_16)
        }


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
        num_warps=_WARPS,
        wide=wide,
        options=options,
    )


def double_bits(value: float) -> int:
    """Returns the bits of a float64, an argument without loss for every accumulate dtype."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
