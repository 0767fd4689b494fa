"""What a call on device tensors is to do beside what torch's own arguments say.

torch hands a backend no wire dtype, no factor and no algorithm. They are set for the thread while it makes
the call: an engine issues a call on the thread that makes it, before the call returns.

    with call_options(wire_dtype=torch.bfloat16):
        work = dist.all_reduce(bucket, dist.ReduceOp.AVG, async_op=True)

All ranks must set the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["NO_OPTIONS", "CallOptions", "call_options", "current_options"]


@dataclass(frozen=True)
class CallOptions:
    """The options of the all-reduces that a thread makes.

    Attributes:
        wire_dtype: What messages of a wider floating-point dtype travel as; None for their own.
        scale: Factor of the result, applied before it is rounded.
        algorithm: Name of the algorithm; "" leaves it to FASTCOLL_ALGO.
        fuse: Whether tensors that are reduced together are reduced as one bucket; None: if they are many and small.
    """

    wire_dtype: torch.dtype | None = None
    scale: float = 1.0
    algorithm: str = ""
    fuse: bool | None = None


NO_OPTIONS = CallOptions()
"""Those of a call for which nothing was set."""


class _OfThread(threading.local):
    options = NO_OPTIONS


_of_thread = _OfThread()


def current_options() -> CallOptions:
    """Returns the options of calls that this thread makes now."""
    return _of_thread.options


@contextlib.contextmanager
def call_options(
    wire_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    algorithm: str = "",
    fuse: bool | None = None,
) -> Iterator[None]:
    """Sets the options of the calls in its body, on this thread; those around it come back after it.

    Args:
        wire_dtype: As in :class:`CallOptions`.
        scale: As in :class:`CallOptions`.
        algorithm: As in :class:`CallOptions`.
        fuse: As in :class:`CallOptions`.
    """
    before = _of_thread.options
    _of_thread.options = CallOptions(wire_dtype, float(scale), algorithm, fuse)
    try:
        yield
    finally:
        _of_thread.options = before
