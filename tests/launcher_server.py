"""A process with torch loaded that never computes, and forks one process for each request of launcher.py.

    python launcher_server.py DESCRIPTOR [MODULE ...]

It has one thread, so forking it is safe. DESCRIPTOR is a packet socket. A request is a pickled dict (see
``Launcher.start``) with two descriptors for output and errors, and a third one if the process has a channel. The
answers are ("ready",), ("started", number, pid) and ("ended", number, wait status). When the socket is closed, all
started processes end.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from multiprocessing import connection
from typing import Any

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Serve requests; return in a forked process with its request, and at the end with None."""
    ended, wakeup = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running: dict[int, int] = {}
    try:
        control.send(pickle.dumps(("ready",)))
        while True:
            readable, _, _ = select.select([control, ended], [], [])
            if ended in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(ended, 4096)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    control.send(pickle.dumps(("ended", running.pop(found[0]), found[1])))
            if control not in readable:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 3)
            if not message:
                break
            request = pickle.loads(message)
            server = os.getpid()
            if pid := os.fork():
                running[pid] = request["number"]
                for descriptor in descriptors:
                    os.close(descriptor)
                control.send(pickle.dumps(("started", request["number"], pid)))
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(ended)
            os.close(wakeup)
            control.close()
            become(request, server, descriptors)
            return request, descriptors[2:]
    except (BrokenPipeError, ConnectionResetError):  # the other side ended with an answer unread
        pass
    for pid in running:  # a process that has changed its user does not die with this process
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    return None


def become(request: dict[str, Any], server: int, descriptors: list[int]) -> None:
    """Make the fork an independent process, which dies with the server."""
    os.setsid()  # Ctrl-C in the terminal reaches only pytest, which then ends the ranks
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    for number, descriptor in enumerate(descriptors[:2], 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in descriptors[2:]:
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    # A background job of a shell inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if request["folder"] is not None:
        os.chdir(request["folder"])
    sys.path += [folder for folder in request["sys_path"] if folder not in sys.path]


def run(request: dict[str, Any], channel: list[int]) -> None:
    """Run the request; then exit at once, unless the process shall end like a Python program."""
    if request["text"] is not None:
        exec(compile(request["text"], "program", "exec"), {"__name__": "__main__"})
    else:
        function, arguments = pickle.loads(request["call"])
        function(*map(connection.Connection, channel), *arguments)
    if not request["real_exit"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Load the common modules, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    environment = dict(os.environ)
    # Else NumPy starts threads when it is loaded, and a fork would compute on all cores.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        del os.environ[name]
        if name in environment:
            os.environ[name] = environment[name]
    gc.collect()
    gc.freeze()  # a fork's garbage collection skips the objects loaded here, and copies none of their pages
    forked = serve(control)
    if forked is not None:
        run(*forked)


if __name__ == "__main__":
    main()
