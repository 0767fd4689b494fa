"""Starts ranks for the fault tests: one process with torch loaded, which forks one rank a request.

    python fault_launcher.py <descriptor of a socket>

A request is a pickled dict with two descriptors, the rank's channel and its log. The answers are
("ready",), ("started", pid) and ("ended", pid, wait status). The end of the socket ends the ranks.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
from multiprocessing import connection

__all__: list[str] = []

PR_SET_PDEATHSIG = 1


def launch(control: socket.socket) -> tuple[bytes, int] | None:
    """Serve requests; return in a forked rank with its call, or with None at the end."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(pickle.dumps(("ready",)))
    while True:
        readable, _, _ = select.select([control, ended], [], [])
        if ended in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                control.send(pickle.dumps(("ended", *found)))
        if control not in readable:
            continue
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 2)
        except ConnectionResetError:  # the test has gone with an answer unread
            return None
        if not message:
            return None
        channel, log = descriptors
        launcher = os.getpid()
        if pid := os.fork():
            os.close(channel)
            os.close(log)
            control.send(pickle.dumps(("started", pid)))
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(ended)
        os.close(wakeup)
        control.close()
        become_rank(launcher, log)
        return message, channel


def become_rank(launcher: int, log: int) -> None:
    """Make the fork a process of its own, which dies with the launcher."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def main() -> None:
    """Load what all ranks need, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    import pytest  # noqa: F401  test modules import it
    import torch.distributed
    import torch.testing
    import torch.utils.data  # noqa: F401
    from fault_rank import run

    gc.freeze()  # a rank's look for garbage passes torch by
    forked = launch(control)
    if forked is not None:
        message, channel = forked
        run(pickle.loads(message), connection.Connection(channel))


if __name__ == "__main__":
    main()
