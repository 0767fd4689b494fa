"""The shared body of flatten and unflatten: read a block, scale it, cast it, write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastcoll.kernels._blocks import is_wide, load, store
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import dtype_name
from fastcoll.kernels._plan import Blocking, constexprs, signature_of

__all__ = ["move_block", "moves"]


@triton.jit
def move_block(
    source, target, left, factor,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Writes a block's elements times `factor`.

    `source` and `target` are addresses; `left` is the number of the tensor's elements from there on.
    """
    if is_wide(source | target, left, BLOCK):
        values = load(source, left, INPUT, ACCUMULATE, BLOCK, True) * factor
        store(target, left, values, OUTPUT, BLOCK, True)
    else:
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            here = source + first * (INPUT.primitive_bitwidth // 8)
            there = target + first * (OUTPUT.primitive_bitwidth // 8)
            values = load(here, left - first, INPUT, ACCUMULATE, NARROW, False) * factor
            store(there, left - first, values, OUTPUT, NARROW, False)


@lru_cache(maxsize=16)
def moves(
    name: str, kernel: Any, pairs: Sequence[tuple[torch.dtype, torch.dtype]], blocking: Blocking
) -> Mapping[tuple[torch.dtype, torch.dtype], Configuration]:
    """Returns the configuration of each pair of dtypes, from and to; the same object for the same arguments.

    Args:
        name: First word of the configurations' names.
        kernel: The kernel.
        pairs: Dtypes to read and to write.
        blocking: Size of a program's block.
    """
    return {
        (source, target): Configuration(
            name=f"{name} {dtype_name(source)}->{dtype_name(target)}",
            kernel=kernel,
            signature=signature_of(kernel),
            constexprs=constexprs(blocking, source, target),
            num_warps=blocking.warps,
            options={"enable_fp_fusion": False},
        )
        for source, target in pairs
    }
