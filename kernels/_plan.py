"""Shared parts of the launches of flatten, unflatten and reduce: the size of a block, and configurations."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton.language as tl

from fastcoll.buckets import BLOCK
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT

__all__ = ["block_configuration", "double_bits"]

_WARPS = 8
_NARROW = (
    4 * 32 * _WARPS
)  # elements of a step through a block that is partial or unaligned: four for each thread


def block_configuration(
    name: str,
    kernel: Any,
    input_dtype: torch.dtype,
    output_dtype: torch.dtype,
    **constexprs: object,
) -> Configuration:
    """Returns the configuration of a kernel on blocks, which takes 64-bit integers, then constexprs.

    Args:
        name: Its name.
        kernel: The kernel.
        input_dtype: Dtype to read.
        output_dtype: Dtype to write.
        **constexprs: Constexprs besides those of all kernels on blocks.
    """
    return Configuration(
        name=name,
        kernel=kernel,
        signature={name: "i64" for name in kernel.arg_names if not name.isupper()},
        constexprs={
            "INPUT": ELEMENT[input_dtype],
            "OUTPUT": ELEMENT[output_dtype],
            "ACCUMULATE": tl.float64 if input_dtype == torch.float64 else tl.float32,
            "BLOCK": BLOCK,
            "NARROW": _NARROW,
            **constexprs,
        },
        num_warps=_WARPS,
        options={"enable_fp_fusion": False},
    )


def double_bits(value: float) -> int:
    """Returns the bits of a float64, an argument without loss for every accumulate dtype."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
