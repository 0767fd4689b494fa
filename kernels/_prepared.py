"""Prepared launches: compiled and packed beforehand, so a call costs almost nothing."""

from __future__ import annotations

import torch

from fastcoll.kernels._launch import Launcher, current_stream

__all__ = ["PreparedLaunch"]


class PreparedLaunch:
    """One launch with its arguments packed: calling it launches.

    It uses the tensors' addresses at preparation, or those of the call. It holds the tables, but not the tensors. Call
    it on the stream on which it was prepared.

    Args:
        run: The launcher.
        grid: Number of programs; 0 launches nothing.
        arguments: The kernel's arguments.
        held: Objects that must live as long.
        place: Index of the first argument that a call may replace.
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
            addresses: Addresses for this call: of source and result, or of a list's address table on the device. The
                tensors must be as aligned and as far apart as those at preparation. Without arguments: the addresses
                at preparation.

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
