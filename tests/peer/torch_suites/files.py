"""Runs a test file, in a process that is forked for it from one that `runs.SuiteFiles` has started.

It imports the file, forks a process for each test, and these fork the ranks. Each reply is one object: {"test",
"outcome", "detail"} for a test, where outcome is "passed", "failed" or "skipped", then {"end": ""};
{"end": why} says why the file gave no more tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def _cases(suite: Any) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from _cases(part)
        else:
            yield part


def _outcome(case: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    wrong = [*result.errors, *result.failures]
    if wrong:
        return "failed", "\n".join(text for _, text in wrong)
    if result.unexpectedSuccesses:
        return "failed", "unexpected success"
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def _run_in_child(case: unittest.TestCase, folder: str, pipe: connection.Connection) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # what it compiles is its own
    os.chdir(folder)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        told = _outcome(case)
    except BaseException:
        told = "failed", traceback.format_exc()
    pipe.send(told)


def _run(case: unittest.TestCase, seconds: float) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="torch-suites-", ignore_cleanup_errors=True) as folder:
        ours, theirs = connection.Pipe()
        child = os.fork()
        if child == 0:
            try:
                _run_in_child(case, folder, theirs)
            finally:
                os._exit(0)
        theirs.close()
        state, told = f"no end within {seconds:g} s", None
        if ours.poll(seconds):
            state = "the process died"
            with contextlib.suppress(EOFError):
                told = ours.recv()
        ours.close()
        for kill in (os.killpg, os.kill):  # whatever the test left behind
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        log = Path(folder, "log")
        printed = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    outcome, detail = told or ("failed", f"{printed}\nTestProcessError: {state}")
    return outcome, detail[-8000:]


def run_file(
    replies: connection.Connection,
    file: Path,
    paths: list[str],
    seconds: float,
    file_seconds: float,
    only: list[str] | None,
) -> None:
    """Runs the tests of one file; see `runs.SuiteFiles.run`."""
    deadline = time.monotonic() + file_seconds
    signal.alarm(int(file_seconds + seconds) + 1)
    # A rank that a test spawns imports the main module again, and needs the same harness.
    sys.modules["__main__"] = sys.modules["torch_suites.harness"]
    paths = [str(file.parent), *paths]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ["PYTHONPATH"]])
    sys.argv = [str(file)]
    try:
        module = importlib.import_module(file.stem)
        load = unittest.defaultTestLoader
        every = only is None
        suite = load.loadTestsFromModule(module) if every else load.loadTestsFromNames(only, module)
    except (Exception, SystemExit) as error:
        replies.send({"end": f"{type(error).__name__}: {error}"})
        return
    for case in _cases(suite):
        if time.monotonic() > deadline:
            replies.send({"end": f"no end within {file_seconds:g} s"})
            return
        method = getattr(case, case._testMethodName)
        skipped = getattr(method, "__unittest_skip__", False)  # by a decorator
        outcome, detail = _outcome(case) if skipped else _run(case, seconds)
        name = f"{type(case).__qualname__}.{case._testMethodName}"
        replies.send({"test": name, "outcome": outcome, "detail": detail})
    replies.send({"end": ""})
