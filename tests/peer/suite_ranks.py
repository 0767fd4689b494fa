"""What the processes run that are forked from one with PyTorch's suite loaded."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
import types
import unittest
from multiprocessing import connection
from typing import Any

from suite_cases import prepare_rank

__all__ = ["play", "tell_tests"]


def play(pipe: connection.Connection, rank: int, test: str, folder: str) -> None:
    """Runs one rank of a test, and ends the process with the test's own exit code."""
    from suite_loaded import SUITE

    code: Any = 1
    try:
        tempfile.tempdir = folder
        prepare_rank(SUITE, test, folder)
        SUITE._run(rank, test, f"{folder}/store", pipe)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def tell_tests(pipe: connection.Connection, folder: str) -> None:
    """Sends why each test is skipped, or None, and the messages of exit codes that are skips."""
    from suite_loaded import SKIPPED, SUITE

    names = [name for name in dir(SUITE) if name.startswith("test_")]
    pipe.send_bytes(pickle.dumps(({name: _skip(SUITE, name, folder) for name in names}, SKIPPED)))


class _Reached(BaseException):
    pass


def _skip(suite: Any, test: str, folder: str) -> str | None:
    """Returns why the test's guards skip it, or None; they are what runs before its own code."""
    from suite_loaded import SKIPPED

    method = getattr(suite, test)
    if getattr(method, "__unittest_skip__", False):
        return str(method.__unittest_skip_why__)
    body = method
    while hasattr(body, "__wrapped__"):
        body = body.__wrapped__

    def stop(frame: types.FrameType, *_: Any) -> None:
        if frame.f_code is body.__code__:
            raise _Reached

    prepare_rank(suite, test, folder)
    instance = suite(test)
    instance.rank = 0
    sys.settrace(stop)
    try:
        getattr(instance, test)()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        return SKIPPED.get(end.code)  # type: ignore[arg-type]
    except _Reached:
        return None
    finally:
        sys.settrace(None)
    return None
