"""Flatten: many tensors into one flat bucket, scaled and cast on the way."""
from __future__ import annotations
import triton
import triton.language as tl

from fastcoll.kernels._blocks import (ALL_INTEGERS, is_wide, load, locate, scale_factor, store, tensor_address)
from fastcoll.kernels._statistics import record, squares_of, flags_of


@triton.jit(do_not_specialize=ALL_INTEGERS)
def flatten_kernel(block_map, sizes, input_rows, output_base, output_row, scale_bits, scale_address, statistics,
                   SOURCE: tl.constexpr, WIRE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    tensor, start, left = locate(block_map, sizes, BLOCK)
    source = tensor_address(block_map.to(tl.int64) * 0, input_rows, tensor, start, SOURCE)
    target = tensor_address(output_base, output_row, tensor, start, WIRE)
    factor = scale_factor(scale_bits, scale_address, ACC)
    if is_wide(source | target, left, BLOCK):
        values = load(source, left, SOURCE, ACC, BLOCK, True) * factor
        stored = store(target, left, values, WIRE, BLOCK, True)
        if statistics != 0:
            record(statistics, squares_of(values), flags_of(stored, WIRE))
    else:
        squares = tl.zeros([NARROW], tl.float32)
        flags = tl.zeros([NARROW], tl.float32)
        left = tl.minimum(left, BLOCK)
        for first in range(0, left, NARROW):
            values = load(source + first * (SOURCE.primitive_bitwidth // 8), left - first, SOURCE, ACC, NARROW, False) * factor
            stored = store(target + first * (WIRE.primitive_bitwidth // 8), left - first, values, WIRE, NARROW, False)
            squares += squares_of(values)
            flags = tl.maximum(flags, flags_of(stored, WIRE))
        if statistics != 0:
            record(statistics, squares, flags)
