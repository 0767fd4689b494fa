"""Sum of squares and finiteness of all that a launch wrote, found in the same pass and deterministic.

Each program leaves the two numbers of its block in its own place; whichever program comes last adds the
places up, always in the same order, so no sum depends on who came when.

The workspace is float32: [0] sum of squares, [1] 1.0 if a value was not finite, [2] count of the programs
that are done (as int32; zero between launches), [4:] one sum for each program, then one flag for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._dtypes import addressed, widen

__all__ = ["HEADER", "record"]

HEADER = 4
"""Numbers of the workspace that come before those of the programs."""


@triton.jit
def squares_of(values):
    """Returns the squares in float32."""
    return (values * values).to(tl.float32)


@triton.jit
def flags_of(stored, TYPE: tl.constexpr):
    """Returns 1.0 for each stored element of TYPE that is infinite or NaN, else 0.0."""
    return tl.where(tl.abs(widen(stored, TYPE, tl.float32)) < float("inf"), 0.0, 1.0)


@triton.jit
def record(statistics, squares, flags):
    """Adds this program's part: vectors of squares and of flags."""
    header: tl.constexpr = 4
    chunk: tl.constexpr = 512
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    base = addressed(statistics, tl.float32)
    all_sums = base + header
    all_flags = all_sums + programs
    tl.store(all_sums + program, tl.sum(squares, axis=0))
    tl.store(all_flags + program, tl.max(flags, axis=0))
    tl.debug_barrier()  # all of the program has stored before the counter says so
    counter = addressed(statistics, tl.int32) + 2
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == programs - 1:
        lanes = tl.arange(0, chunk)
        total = tl.zeros([chunk], tl.float32)
        flag = tl.zeros([chunk], tl.float32)
        for first in range(0, programs, chunk):
            there = first + lanes < programs
            total += tl.load(all_sums + first + lanes, mask=there, other=0.0, cache_modifier=".cg")
            found = tl.load(all_flags + first + lanes, mask=there, other=0.0, cache_modifier=".cg")
            flag = tl.maximum(flag, found)
        tl.store(base, tl.sum(total, axis=0))
        tl.store(base + 1, tl.max(flag, axis=0))
        tl.store(counter, 0)
