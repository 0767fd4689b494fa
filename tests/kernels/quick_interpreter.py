"""Triton's interpreter, four times faster and kinder to other ranks, for processes that only run tests.

It patches the whole language module at each call of a device function, which takes 1.7 ms, and checks each integer
operation for overflow. Once is enough for the first; the second a GPU does not do either.
"""

import dataclasses
import functools
import time
from typing import Any

import numpy
import triton
from triton.runtime import interpreter

__all__ = ["install", "pause", "polls"]

pause = [0.0001]
"""Seconds that this process waits after each poll."""

polls = [0]
"""How often flags have been polled."""


@functools.cache
def install() -> None:
    """Makes this process's interpreter quick; polls of flags give way to the other ranks."""
    if triton.__version__.startswith("3.6.") and tuple(
        map(int, numpy.__version__.split(".")[:2])
    ) >= (2, 4):
        raise RuntimeError(
            "the interpreter of Triton 3.6 needs an older NumPy: pip install 'numpy<2.4'"
        )
    patched: set[Any] = set()

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    atomic = interpreter.InterpreterBuilder.create_atomic_rmw

    def with_pause(self: Any, operation: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        result = atomic(self, operation, pointer, value, *rest)
        if not value.data.any():  # an addition of 0 is a poll, and there are more ranks than cores
            polls[0] += 1
            time.sleep(pause[0])
        return result

    interpreter.InterpreterBuilder.create_atomic_rmw = with_pause
