"""`Launcher`: runs test files on one backend."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch_suites.source import BUILD

__all__ = ["FileOutcomes", "Launcher"]

_HARNESS_ENDS_EARLIER = 10.0  # seconds

FileOutcomes = dict[str, dict[str, Any]]


class Launcher:
    """The program that runs test files, with torch imported once, on one backend."""

    def __init__(self, test: Path, backend: str, test_seconds: float) -> None:
        """Starts the program.

        Args:
            test: folder `test` of PyTorch's source.
            backend: "gloo", or the backend that is put in its place.
            test_seconds: limit for one test.
        """
        self.backend = backend
        self._test = test
        self._seconds = test_seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="suites-", ignore_cleanup_errors=True)
        self._errors = open(f"{self._scratch.name}/errors", "w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_suites.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=self._scratch.name,
            env=self._environment(),
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        replaces = {"FASTCOLL_REPLACE": "gloo"} if self.backend == "fastcoll" else {}
        here = str(Path(__file__).parents[1])
        return {
            **os.environ,
            **replaces,
            "TORCH_SUITES_BACKEND": self.backend,
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # torch's harness ends a test before the launcher does, and tells where ranks stand.
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": f"{self._seconds - _HARNESS_ENDS_EARLIER:.0f}",
            "MASTER_ADDR": "127.0.0.1",
            # Inductor's tests compile probes of the compiler and the processor when they are imported:
            # the first once for all files, kept here, the second not at all.
            "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            # Read by files that PyTorch's own runner starts once for each backend.
            "BACKEND": "gloo",
            "WORLD_SIZE": "4",
            "TMPDIR": self._scratch.name,
        }

    def run(
        self, file: str, file_seconds: float, only: list[str] | None = None
    ) -> tuple[FileOutcomes, str]:
        """Runs the tests of one file and returns what became of each, and why it ended early.

        Args:
            file: path below test/distributed.
            file_seconds: limit for the file; tests that it leaves out are not in the result.
            only: names of the tests to run, as CLASS.TEST; None for all.
        """
        request = {
            "file": str(self._test / "distributed" / file),
            "paths": [str(self._test)],
            "seconds": self._seconds,
            "file_seconds": file_seconds,
            "only": only,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        outcomes: FileOutcomes = {}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            reply = json.loads(line)
            if "end" in reply:
                return outcomes, reply["end"]
            outcomes[reply.pop("test")] = reply
        self._errors.seek(0)
        raise RuntimeError(
            f"the launcher of {self.backend!r} ended with {self._process.wait()}:\n"
            + self._errors.read()[-3000:]
        )

    def close(self) -> None:
        """Ends the program and removes what it left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()
        self._scratch.cleanup()
