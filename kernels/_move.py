"""What flatten and unflatten do with a block: read it, scale it, cast it, write it, and measure what is written."""

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
from fastcoll.kernels._statistics import flags_of, record, squares_of

__all__ = ["move_block", "moves"]


@triton.jit
def _scaled(source, target, left, factor, accumulate, INPUT, OUTPUT, ACCUMULATE, LANES, WIDE):
    values = load(source, left, INPUT, ACCUMULATE, LANES, WIDE) * factor
    if accumulate != 0:
        values += load(target, left, OUTPUT, ACCUMULATE, LANES, WIDE)
    return values


@triton.jit
def move_block(
    source, target, left, factor, accumulate, statistics,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Writes a block's elements times `factor`, plus unless `accumulate` is 0 what was there.

    `source` and `target` are addresses, `left` says how many elements of the tensor begin there. Where `accumulate`
    is a constant 0, nothing of it is compiled.
    """
    sum_of_squares = 0.0
    flag = 0.0
    if is_wide(source | target, left, BLOCK):
        values = _scaled(
            source, target, left, factor, accumulate, INPUT, OUTPUT, ACCUMULATE, BLOCK, True
        )
        stored = store(target, left, values, OUTPUT, BLOCK, True)
        if statistics != 0:
            sum_of_squares = tl.sum(squares_of(values), axis=0)
            flag = tl.max(flags_of(values, stored, OUTPUT), axis=0)
    else:
        squares = tl.zeros([NARROW], tl.float32)
        flags = tl.zeros([NARROW], tl.float32)
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            there = left - first
            to = target + first * (OUTPUT.primitive_bitwidth // 8)
            values = _scaled(
                source + first * (INPUT.primitive_bitwidth // 8), to, there, factor, accumulate,
                INPUT, OUTPUT, ACCUMULATE, NARROW, False,
            )  # fmt: skip
            stored = store(to, there, values, OUTPUT, NARROW, False)
            squares += tl.where(tl.arange(0, NARROW) < there, squares_of(values), 0.0)
            flags = tl.maximum(flags, flags_of(values, stored, OUTPUT))
        if statistics != 0:
            sum_of_squares = tl.sum(squares, axis=0)
            flag = tl.max(flags, axis=0)
    if statistics != 0:
        record(statistics, sum_of_squares, flag)


@lru_cache(maxsize=16)
def moves(
    name: str, kernel: Any, pairs: Sequence[tuple[torch.dtype, torch.dtype]], blocking: Blocking
) -> Mapping[tuple[object, ...], Configuration]:
    """Returns the configuration of each pair of dtypes, from and to; the same object for the same arguments.

    Args:
        name: First word of the configurations' names.
        kernel: What is launched.
        pairs: Dtypes that are read and written.
        blocking: How much a program does.
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
