"""One specialisation of a kernel, which launchers choose and tests compile and compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Configuration"]


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
        num_stages: Depth of software pipelining.
        wide: Whether the main loop must access global memory by 128 bits.
        options: Further compiler options, by name: ``{"maxnreg": 64}``.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible_by_16: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 1
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
