"""One specialisation of a kernel: what a launcher may choose, and tests compile and compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Configuration"]


@dataclass(frozen=True, eq=False)
class Configuration:
    """All that decides which machine code a launch runs.

    A launcher never launches anything else: it takes the configuration out of the table that
    ``configurations()`` of its module yields, so the tests compile every kernel that can run.

    Attributes:
        name: Row of the table, unique: "flatten float32->bfloat16 norm".
        kernel: The ``@triton.jit`` function.
        signature: Triton's type of each argument that is no constexpr, in the order of the function's
            arguments: ``{"table": "*i64", "count": "i64"}``. An int argument stays of this type
            whatever its value, unlike in ``kernel[grid](...)``.
        constexprs: Value of each constexpr argument.
        divisible_by_16: Names of the arguments whose values are multiples of 16.
        num_warps: Warps of a program.
        num_stages: Depth of software pipelining.
        wide: Whether the main loop must access global memory by 128 bits.
        options: What else the compiler is told, by name: ``{"maxnreg": 64}``.
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
        """Returns ``divisible_by_16`` as Triton's ``ASTSource`` takes it.

        Raises:
            ValueError: A name is not one of an argument in the signature.
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
