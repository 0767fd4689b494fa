"""Launches prepared once: compiled and packed before, so that a call costs next to nothing."""

from __future__ import annotations

import torch

from fastcoll.kernels._launch import Launcher, current_stream

__all__ = ["PreparedLaunch"]


class PreparedLaunch:
    """One launch with its arguments packed: calling it launches.

    Reads and writes the tensors where they were, or where the call says; holds none of them, only the tables. To be
    called on the stream on which it was prepared.

    Args:
        run: What launches.
        grid: Programs; with 0 nothing is launched.
        arguments: Of the kernel.
        held: What must live as long.
        place: Which argument is the first that calls may give instead.
    """

    __slots__ = ("_held", "_index", "_launch", "_stream")

    def __init__(
        self,
        run: Launcher,
        grid: int,
        arguments: tuple[int, ...],
        held: object,
        place: int = 0,
    ) -> None:
        self._held = held
        self._index = run.device.index if run.device.type == "cuda" else None
        self._stream = current_stream(run.device)
        self._launch = run.pack(self._stream, grid, arguments, place) if grid else _nothing

    def __call__(self, *addresses: int) -> None:
        """Launches.

        Args:
            addresses: Where the tensors lie this time, as aligned and as far apart as those it was prepared for: that
                of the source and of the result, or that of the device's table of a list's addresses. None: where they
                lay then.

        Raises:
            RuntimeError: The current stream is not the one on which this was prepared.
        """
        index = self._index
        if index is not None and torch._C._cuda_getCurrentRawStream(index) != self._stream:
            raise RuntimeError(
                "fastcoll.kernels: expected the stream on which this launch was prepared, got another one: "
                "the tables it reads are only valid on that stream. Prepare it on this stream."
            )
        self._launch(*addresses)


def _nothing(*_: int) -> None: ...
