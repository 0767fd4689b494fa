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

    Reads and writes the tensors where they were, or where the call says; holds none of them, only the tables. To be
    called on the stream on which it was prepared.

    Args:
        run: What launches.
        grid: Programs.
        arguments: Of the kernel.
        held: What must live as long.
        clear: What is done if there are no programs.
        place: Which argument is the first that calls may give instead.
    """

    __slots__ = ("_held", "_index", "_launch", "_stream")

    def __init__(
        self,
        run: Launcher,
        grid: int,
        arguments: tuple[int, ...],
        held: object,
        clear: Callable[[], None] | None = None,
        place: int = 0,
    ) -> None:
        self._held = held
        self._index = run.device.index if run.device.type == "cuda" else None
        self._stream = current_stream(run.device)
        if grid:
            self._launch = run.pack(self._stream, grid, arguments, place)
        else:
            self._launch = _ignoring(clear or _nothing)

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
                "the tables it reads are only known to be there on its own. Prepare it on this stream."
            )
        self._launch(*addresses)


def _nothing() -> None: ...


def _ignoring(call: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: call()


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
