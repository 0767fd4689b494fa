"""Sum of squares and finiteness of all that a launch wrote, found in the same pass and deterministic.

Each program leaves the two numbers of its block in its own place; whichever program comes last adds the
places up, always in the same order, so no sum depends on who came when.

The workspace is float32: [0] sum of squares, [1] 1.0 if a value was not finite, [2] count of the programs
that are done (as int32; zero between launches), [4:] one sum for each program, then one flag for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcoll.kernels._dtypes import addressed, widen

__all__ = ["Statistics", "flags_of", "record", "squares_of"]

_HEADER = 4  # numbers of the workspace before those of the programs; `record` has it too


class Statistics:
    """What a launch says of the values it wrote. One object serves one launch at a time.

    Args:
        programs: At least as many as any launch that uses it has; ``layout.blocks(1024)`` is safe for all.
        device: Of the kernels.

    Attributes:
        sum_of_squares: float32 scalar on the device: of the values as they were before the last rounding,
            scaled. float32 squares overflow beyond 1.8e19.
        nonfinite: float32 scalar on the device: 1.0 if a value is infinite or NaN before or after it was
            rounded to what was stored, else 0.0; of the type that ``torch.amp.GradScaler`` keeps as ``found_inf``.
    """

    def __init__(self, programs: int, device: torch.device | str) -> None:
        self.programs = programs
        self._workspace = torch.zeros(
            _HEADER + 2 * programs, dtype=torch.float32, device=torch.device(device)
        )
        self.sum_of_squares: Tensor = self._workspace[0]
        self.nonfinite: Tensor = self._workspace[1]

    @property
    def device(self) -> torch.device:
        """Where the workspace lies."""
        return self._workspace.device

    @property
    def address(self) -> int:
        """Of the workspace."""
        return self._workspace.data_ptr()

    def clear(self) -> None:
        """Makes both numbers 0, as of a launch that wrote nothing."""
        self._workspace.zero_()


@triton.jit
def squares_of(values):
    """Returns the squares in float32."""
    return (values * values).to(tl.float32)


@triton.jit
def flags_of(values, stored, TYPE: tl.constexpr):
    """Returns 1.0 where a value, or what was stored of it as TYPE, is infinite or NaN, else 0.0."""
    finite = tl.abs(values) < float("inf")
    finite = finite & (tl.abs(widen(stored, TYPE, values.dtype)) < float("inf"))
    return tl.where(finite, 0.0, 1.0)


@triton.jit
def record(statistics, squares, flag):
    """Adds this program's sum of squares and its flag; the last program adds up all programs'."""
    header: tl.constexpr = 4
    chunk: tl.constexpr = 1024
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    base = addressed(statistics, tl.float32)
    all_squares = base + header
    all_flags = all_squares + programs
    tl.store(all_squares + program, squares)
    tl.store(all_flags + program, flag)
    tl.debug_barrier()  # all of the program has stored before the counter says so
    counter = addressed(statistics, tl.int32) + 2
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == programs - 1:
        lanes = tl.arange(0, chunk)
        total = tl.zeros([chunk], tl.float32)
        found = tl.zeros([chunk], tl.float32)
        for first in range(0, programs, chunk):
            there = first + lanes < programs
            part = tl.load(all_squares + first + lanes, mask=there, other=0.0, cache_modifier=".cg")
            total += part
            part = tl.load(all_flags + first + lanes, mask=there, other=0.0, cache_modifier=".cg")
            found = tl.maximum(found, part)
        tl.store(base, tl.sum(total, axis=0))
        tl.store(base + 1, tl.max(found, axis=0))
        tl.store(counter, 0)
