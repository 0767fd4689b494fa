"""Runs tests of PyTorch's suite, each in freshly forked ranks; a program, started by `TorchSuite`.

torch and the suite are imported once, in this process, which then never computes: it stays
single-threaded, so that forking it is safe, and costs milliseconds where torch's own harness spawns
and imports three times a test. Every test still has processes of its own, as in that harness, so
exit codes, crashes and leaked state stay inside it.

Protocol: one JSON object a line. In: {"test", "seconds"}. Out: {"outcome", "detail", "seconds", "beneath_guard"}.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import suite_cases
import torch
from torch.testing._internal.common_distributed import TEST_SKIPS

_SKIP_MESSAGES = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
_SECONDS_AFTER_A_FAILURE = 3.0  # how long the other ranks may still talk
_PR_SET_PDEATHSIG = 1


def _rank_main(suite: type, rank: int, name: str, folder: str, pipe: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = open(f"{folder}/log.{rank}", "w", buffering=1)  # noqa: SIM115  (open as long as the rank)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.register(signal.SIGUSR1, file=log)
    faulthandler.enable(log)
    suite_cases.prepare_rank(suite, name, folder)
    suite._run(rank, name, f"{folder}/store", pipe)


def _make_folder() -> str:
    folder = tempfile.mkdtemp(prefix="distributed-suite-")
    for part in ("barrier", "test_dir", "init_dir"):
        os.mkdir(f"{folder}/{part}")
    return folder


def _wait_for_ranks(ranks: list[Any], seconds: float) -> list[int]:
    """Waits until all exit, ends those that outstay the deadline, and returns the ranks so ended."""
    deadline = time.monotonic() + seconds
    failed = False
    while alive := [p for p in ranks if p.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([p.sentinel for p in alive], left)
        if not failed and any(p.exitcode not in (None, 0, *_SKIP_MESSAGES) for p in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_A_FAILURE)
    hung = [r for r, p in enumerate(ranks) if p.is_alive()]
    for r in hung:
        os.kill(
            ranks[r].pid, signal.SIGUSR1
        )  # faulthandler writes every thread's stack into the log
    if hung:
        time.sleep(0.3)
    for r in hung:
        ranks[r].kill()
    for p in ranks:
        p.join()
    return hung


def _describe(rank: int, code: int, hung: bool, pipe: Any, folder: str) -> str:
    try:
        error = pipe.recv() if pipe.poll() else ""
    except EOFError:
        error = ""
    log = Path(f"{folder}/log.{rank}")
    told = error or (log.read_text(errors="replace")[-6000:] if log.exists() else "")
    state = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    if hung:
        state = "still at it, ended"
    return f"--- rank {rank}: {state}\n{told}"


def run_test(suite: type, name: str, seconds: float) -> dict[str, Any]:
    """Runs one test on freshly forked ranks within `seconds` and returns what became of it."""
    reason = suite_cases.skip_reason(suite, name)
    if reason is not None:
        return {"outcome": "skipped", "detail": reason}
    folder = _make_folder()
    fork = multiprocessing.get_context("fork")
    ranks, pipes = [], []
    for rank in range(suite_cases.world_size(name)):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_rank_main, args=(suite, rank, name, folder, theirs))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    try:
        hung = _wait_for_ranks(ranks, seconds)
        codes = [p.exitcode for p in ranks]
        # As in torch's harness rank 0 says whether a test is skipped; unlike there, every rank must end well.
        if not hung and all(c == 0 or c in _SKIP_MESSAGES for c in codes):
            if codes[0] == 0:
                return {"outcome": "passed", "detail": ""}
            return {"outcome": "skipped", "detail": _SKIP_MESSAGES[codes[0]]}
        culprits_first = sorted((r for r, c in enumerate(codes) if c), key=lambda r: r in hung)
        parts = [_describe(r, codes[r], r in hung, pipes[r], folder) for r in culprits_first]
        return {"outcome": "failed", "detail": "\n".join(parts)}
    finally:
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that a library prints may enter the protocol
    suite = suite_cases.load_suite()
    names = sorted(n for n in dir(suite) if n.startswith("test_"))
    print(json.dumps({"torch": torch.__version__.split("+")[0], "tests": names}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        reply = run_test(suite, request["test"], request["seconds"])
        reply["seconds"] = round(time.monotonic() - start, 3)
        reply["beneath_guard"] = getattr(getattr(suite, request["test"]), "beneath_guard", False)
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
