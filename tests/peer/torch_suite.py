"""`TorchSuite`: runs tests of PyTorch's suite on one backend."""

from __future__ import annotations

import contextlib
import pickle
import time
from multiprocessing import connection
from pathlib import Path

from launcher import Launcher, Process, dump_stacks, ending
from suite_cases import world_size
from suite_ranks import play, tell_tests

__all__ = ["TorchSuite"]

DEADLINE = 50.0
"""Seconds for one test, below the suite's own 60 s for a collective; gloo's longest test takes 5."""

AFTER_A_FAILURE = 10.0
"""Seconds that the other ranks of a test may still run."""


class TorchSuite:
    """PyTorch's suite for one backend.

    Attributes:
        skips: why its guards skip each test, or None, by name.
    """

    def __init__(self, backend: str, folder: Path) -> None:
        # No CUDA: with a few GPUs, but fewer than ranks, the suite would skip every test.
        environment = {"CUDA_VISIBLE_DEVICES": "", "FASTCOLL_TEST_BACKEND": backend}
        self._launcher = Launcher(environment, preload=["suite_loaded"])
        log = folder / "tests.log"
        pipe, theirs = connection.Pipe()
        with theirs:
            self._launcher.start(tell_tests, str(folder), log=log, channel=theirs)
        try:
            self.skips, self._skipped = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise RuntimeError(f"the suite tells no tests:\n{log.read_text()}") from None

    def run(self, test: str, folder: Path) -> tuple[str, str]:
        """Runs a test and returns "passed", "skipped" or "failed", and why.

        Args:
            test: its name.
            folder: an empty one, which the test may fill.
        """
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
        logs = [folder / f"log.{rank}" for rank in range(world_size(test))]
        ranks, pipes = [], []
        try:
            for rank, log in enumerate(logs):
                ours, theirs = connection.Pipe()
                pipes.append(ours)
                with theirs:
                    ranks.append(
                        self._launcher.start(
                            *(play, rank, test, str(folder)),
                            log=log,
                            channel=theirs,
                            environment={"TMPDIR": str(folder)},
                        )
                    )
            hung = self._wait(ranks)
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        # As in torch's harness rank 0 says whether a test is skipped; unlike there, every rank must end well.
        if not hung and all(code == 0 or code in self._skipped for code in codes):
            return ("skipped", self._skipped[codes[0]]) if codes[0] else ("passed", "")
        parts = []
        for rank in sorted((r for r, code in enumerate(codes) if code != 0), key=hung.__contains__):
            told = logs[rank].read_text(errors="replace")[-6000:]
            with contextlib.suppress(EOFError):
                told = pipes[rank].recv() if pipes[rank].poll() else told
            state = "no end in time" if rank in hung else ending(codes[rank])
            parts.append(f"--- rank {rank}: {state}\n{told}")
        return "failed", "\n".join(parts)

    def close(self) -> None:
        """Ends the launcher, and with it all ranks."""
        self._launcher.close()

    def _wait(self, ranks: list[Process]) -> list[int]:
        """Waits until all have ended, or the time is over, and returns the ranks that have not."""
        end = time.monotonic() + DEADLINE
        failed = False
        while running := [r for r, process in enumerate(ranks) if process.exitcode is None]:
            if time.monotonic() > end:
                dump_stacks(ranks)
                break
            ranks[running[0]].wait(0.02)
            if not failed and any(p.exitcode not in (None, 0, *self._skipped) for p in ranks):
                failed = True
                end = min(end, time.monotonic() + AFTER_A_FAILURE)
        return running
