"""Launches prepared once: checked, compiled and packed before, so that a call costs next to nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

from fastcoll.kernels._launch import Launcher, current_stream

__all__ = ["PreparedLaunch", "at_once"]

_Arguments = ParamSpec("_Arguments")


class PreparedLaunch:
    """One launch with everything checked and packed: calling it launches.

    Reads and writes the tensors where they were; holds none of them, only the tables. To be called on the
    stream on which it was prepared.
    """

    __slots__ = ("_held", "_index", "_launch", "_stream")

    def __init__(
        self,
        run: Launcher,
        grid: int,
        arguments: tuple[int, ...],
        held: object,
        clear: Callable[[], None] | None = None,
    ) -> None:
        self._held = held
        self._index = run.device.index if run.device.type == "cuda" else None
        self._stream = current_stream(run.device)
        if grid:
            self._launch = run.pack(self._stream, grid, arguments)
        else:
            self._launch = clear or _nothing

    def __call__(self) -> None:
        """Launches.

        Raises:
            RuntimeError: The current stream is not the one on which this was prepared.
        """
        index = self._index
        if index is not None and torch._C._cuda_getCurrentRawStream(index) != self._stream:
            raise RuntimeError(
                "fastcoll.kernels: expected the stream on which this launch was prepared, got another one: "
                "the tables it reads are only known to be there on its own. Prepare it on this stream."
            )
        self._launch()


def _nothing() -> None: ...


def at_once(prepare: Callable[_Arguments, PreparedLaunch]) -> Callable[_Arguments, None]:
    """Returns the call that launches on the current stream, once, what `prepare` returns for the same arguments."""
    name = prepare.__name__.removeprefix("prepare_")

    @functools.wraps(prepare)
    def launch(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        prepare(*arguments, **keywords)()

    launch.__name__ = launch.__qualname__ = name
    launch.__doc__ = (
        f"Launches at once; arguments and errors are those of :func:`{prepare.__name__}`."
    )
    return launch
