"""`TorchSuite`: the door through which pytest and the recorder reach the launcher of PyTorch's suite."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["DEADLINE", "TorchSuite"]

DEADLINE = 40.0  # seconds for one test, below the suite's own 60 s for a collective; gloo's longest test takes 5
_START_SECONDS = 120.0
_GRACE_SECONDS = 20.0


class TorchSuite:
    """PyTorch's suite for one backend; starts its launcher at once, and again after it was lost.

    Attributes:
        torch_version: release the suite was read from, without the local part.
        tests: names of all its test methods, sorted.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._scratch = tempfile.TemporaryDirectory(prefix="torch-suite-")
        self._launcher: subprocess.Popen[str] | None = None
        self._start()

    def run(self, test: str, seconds: float = DEADLINE) -> dict[str, Any]:
        """Runs one test and returns its reply.

        Keys: outcome ("passed", "skipped" or "failed"), detail, seconds, beneath_guard.
        """
        if self._launcher is None:
            self._start()
        assert self._launcher is not None and self._launcher.stdin is not None
        try:
            self._launcher.stdin.write(json.dumps({"test": test, "seconds": seconds}) + "\n")
            self._launcher.stdin.flush()
            return self._reply(seconds + _GRACE_SECONDS)
        except (OSError, RuntimeError) as error:
            self._end_launcher()
            detail = f"the launcher was lost: {error}"
            return {"outcome": "failed", "detail": detail, "seconds": 0.0, "beneath_guard": False}
        except (
            BaseException
        ):  # Ctrl-C or pytest-timeout: this answer would be taken for the next one's
            self._end_launcher()
            raise

    def close(self) -> None:
        """Ends the launcher, whose ranks die with it, and removes what they left in their scratch folder."""
        self._end_launcher()
        self._scratch.cleanup()

    def _end_launcher(self) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            for stream in (self._launcher.stdin, self._launcher.stdout):
                with contextlib.suppress(OSError):
                    stream.close()
            self._launcher = None

    def _start(self) -> None:
        self._launcher = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("suite_launcher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # No CUDA: with a few GPUs, but fewer than ranks, the suite would skip every test.
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "FASTCOLL_TEST_BACKEND": self._backend,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": self._scratch.name,
            },
        )
        hello = self._reply(_START_SECONDS)
        self.torch_version: str = hello["torch"]
        self.tests: list[str] = hello["tests"]

    def _reply(self, seconds: float) -> dict[str, Any]:
        assert self._launcher is not None and self._launcher.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise RuntimeError(
                    f"no answer from the launcher of {self._backend!r} within {seconds} s"
                )
        line = self._launcher.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the launcher of {self._backend!r} ended, status {self._launcher.wait()}: see its stderr"
            )
        return json.loads(line)
