"""Runs programs in interpreters of their own, forked from one that has torch and CuPy loaded, and no NCCL.

    python nccl_launcher.py

A line of standard input is a program as JSON: its text, environment, folder and time limit in seconds. The
answer is a line with its exit status, negative for a signal. What it prints lies in the folder, in ``stdout``
and ``stderr``. The program is the main program of its interpreter, which ends as any other does.
"""

import gc
import json
import os
import signal
import sys
import time

__all__: list[str] = []


def launch() -> str | None:
    """Answers requests; returns in a forked child with its program, or with None at the end."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            return str(request["text"])
        print(json.dumps(end_of(child, time.monotonic() + request["limit"])), flush=True)
    return None


def end_of(child: int, deadline: float) -> int:
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # faulthandler prints all stacks
            found = os.waitpid(child, 0)
            break
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


def become(request: dict[str, str]) -> None:
    os.chdir(request["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])


if __name__ == "__main__":
    import cupy  # noqa: F401

    import fastcoll.cuda.nccl  # noqa: F401

    gc.freeze()  # what is loaded here, a child's end need not look through
    program = launch()
    if program is not None:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
