"""`SuiteFiles`: runs test files on one backend."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from launcher import Launcher, ending

from torch_suites.files import run_file

BUILD = Path(__file__).parents[3] / "build" / "torch_suites"
_HARNESS_ENDS_EARLIER = 10.0  # seconds

FileOutcomes = dict[str, dict[str, Any]]


class SuiteFiles:
    """Runs test files, with torch imported once, on one backend."""

    def __init__(
        self, test: Path, backend: str, test_seconds: float, preload: Iterable[str] = ()
    ) -> None:
        """Starts the launcher.

        Args:
            test: folder `test` of PyTorch's source.
            backend: "gloo", or "fastcoll" in its place.
            test_seconds: limit for one test.
            preload: modules with tests that are imported once.
        """
        self.backend = backend
        self._test = test
        self._seconds = test_seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="suites-", ignore_cleanup_errors=True)
        environment = {
            **({"FASTCOLL_REPLACE": "gloo"} if backend == "fastcoll" else {}),
            "TORCH_SUITES_BACKEND": backend,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # torch's harness ends a test before the launcher does, and tells where ranks stand.
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": f"{test_seconds - _HARNESS_ENDS_EARLIER:.0f}",
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
        self._launcher = Launcher(environment, ["torch_suites.harness", *preload]).wait()

    def run(
        self, file: str, file_seconds: float, only: list[str] | None = None
    ) -> tuple[FileOutcomes, str]:
        """Runs the tests of one file and returns what became of each, and why it ended early.

        Args:
            file: path below test/distributed.
            file_seconds: limit for the file; tests that it leaves out are not in the result.
            only: names of the tests to run, as CLASS.TEST; None for all.
        """
        ours, theirs = connection.Pipe()
        log = Path(self._scratch.name, "log")
        with theirs:
            process = self._launcher.start(
                *(run_file, self._test / "distributed" / file, [str(self._test)]),
                *(self._seconds, file_seconds, only),
                log=log,
                channel=theirs,
                folder=log.parent,
            )
        outcomes: FileOutcomes = {}
        try:
            while "end" not in (reply := ours.recv()):
                outcomes[reply.pop("test")] = reply
        except EOFError:
            return outcomes, f"the process of the file ended with {ending(process.wait(10.0))}"
        return outcomes, reply["end"]

    def close(self) -> None:
        """Ends all processes and removes what they left."""
        self._launcher.close()
        self._scratch.cleanup()
