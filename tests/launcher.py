"""Starts processes with torch loaded: the ranks of worlds, fault tests and suites, and whole programs.

A fork of a process with torch loaded takes tens of milliseconds; an interpreter that imports torch takes more than a
second. A ``Launcher`` is the test's side of such a process, the server (launcher_server.py). The server starts with the
launcher, in the background. It ends with this process, and so do all processes that it started. Only processes started
here are killed.
"""

import contextlib
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

TORCH = ("torch", "torch.testing", "torch.utils.data", "pytest")
"""Modules that test modules import; loading takes a second."""

MORE = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
)
"""Modules that many tests import too; loading takes another two seconds."""

PATIENCE = 300.0
"""Seconds that the server may take to load its modules, or to fork, on a busy machine."""


class LauncherFailed(AssertionError):
    """The server has ended, or does not answer."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended: exit status (negative for a signal) and output."""

    status: int
    stdout: str
    stderr: str


class Launcher:
    """A process that has imported the modules of ``preload``, and forks others.

    Variables that must be set before torch is loaded belong into ``environment``.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, preload: Iterable[str] = TORCH
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        server = Path(__file__).with_name("launcher_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(server), str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": import_path(), **(environment or {})},
        )
        theirs.close()
        self._numbers = itertools.count()
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._ready = False

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def wait(self) -> "Launcher":
        """Wait until the server has loaded its modules."""
        while not self._ready:
            self._receive(PATIENCE)
        return self

    def start(
        self,
        what: Callable[..., None] | str,
        *arguments: Any,
        log: Path | tuple[Path, Path],
        channel: connection.Connection | None = None,
        environment: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        real_exit: bool = False,
    ) -> "Process":
        """Fork a process, which leads its own session.

        Args:
            what: a function of a module, or the text of a program, which becomes the interpreter's main program.
            arguments: the function's arguments; anything that pickles.
            log: the file for output and errors, or one file for each.
            channel: passed to the function before its arguments.
            environment: variables to set first, or with None to remove.
            folder: the process's working directory; by default that of the server.
            real_exit: whether it ends like a Python program (threads joined, ``atexit``, destructors of C++), which
                takes half a second with torch; else it ends by ``os._exit``, unless it raises.
        """
        self.wait()
        number = next(self._numbers)
        is_text = isinstance(what, str)
        request = {
            "number": number,
            "text": what if is_text else None,
            "call": None if is_text else pickle.dumps((what, arguments)),
            "environment": dict(environment or {}),
            "folder": None if folder is None else str(folder),
            "sys_path": _sys_path(),
            "real_exit": real_exit,
        }
        output, errors = log if isinstance(log, tuple) else (log, log)
        with open(output, "ab") as first, open(errors, "ab") as second:
            descriptors = [first.fileno(), second.fileno()]
            if channel is not None:
                descriptors.append(channel.fileno())
            try:
                socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                self._fail()
        while number not in self._pids:
            self._receive(PATIENCE)
        return Process(self, number, self._pids.pop(number))

    def program(
        self, text: str, folder: Path, *, limit: float = 60, **environment: str | None
    ) -> Ended:
        """Run the text of a program in ``folder`` and return its status and output, which the folder has as files, too.

        After ``limit`` seconds SIGABRT ends the program, with all stacks in ``stderr``.
        """
        return self._program(text, folder, environment).ended(limit, folder)

    def ranks(
        self, text: str, size: int, folder: Path, *, limit: float = 60, **environment: str | None
    ) -> list[Ended]:
        """Run the text of a program on ranks of one host, as torchrun does; return each rank's status and output.

        Each rank works in the folder with its number; see ``program``.
        """
        from torch.distributed import TCPStore

        from fastcoll._launch import rank_variables

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(size):
            (folder / str(rank)).mkdir()
            given = {
                **rank_variables(rank, size, rank, size, "127.0.0.1", store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank makes a store
                **environment,
            }
            processes.append(self._program(text, folder / str(rank), given))
        return [process.ended(limit, folder / str(r)) for r, process in enumerate(processes)]

    def _program(self, text: str, folder: Path, environment: Mapping[str, str | None]) -> "Process":
        log = folder / "stdout", folder / "stderr"
        return self.start(text, log=log, environment=environment, folder=folder, real_exit=True)

    def close(self) -> None:
        """End the server, and all processes that it started."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def status(self, number: int, timeout: float) -> int | None:
        """Return the exit code of the process with this number; see ``Process.wait``."""
        end = time.monotonic() + timeout
        while number not in self._statuses and (left := end - time.monotonic()) > 0:
            self._receive(left, must=False)
        while number not in self._statuses and self._receive(0.0, must=False):
            pass
        return self._statuses.get(number)

    def _receive(self, timeout: float, must: bool = True) -> bool:
        if not select.select([self._socket], [], [], max(0.0, timeout))[0]:
            if must:
                raise LauncherFailed(f"the launcher has not answered for {timeout:g} s")
            return False
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._fail()
        what, *values = pickle.loads(data)
        if what == "ready":
            self._ready = True
        elif what == "started":
            self._pids[values[0]] = values[1]
        else:
            self._statuses[values[0]] = os.waitstatus_to_exitcode(values[1])
        return True

    def _fail(self) -> None:
        status = self._process.wait(10)
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace")[-4000:]
        raise LauncherFailed(f"the launcher ended with {status}\n{printed}")


@dataclass(frozen=True)
class Process:
    """A process that a launcher has forked."""

    launcher: Launcher
    number: int
    pid: int

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, negative for a signal, or None if it has not ended in time."""
        return self.launcher.status(self.number, timeout)

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.wait(0.0)

    @property
    def running(self) -> bool:
        """Whether the process has not ended; it ends with its launcher."""
        return self.launcher.alive and self.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        if self.running:
            self.signal(signal.SIGKILL)
            self.wait(PATIENCE)

    def ended(self, limit: float, folder: Path) -> Ended:
        """Wait for the end, for at most ``limit`` seconds; return status and output."""
        if (status := self.wait(limit)) is None:
            self.signal(signal.SIGABRT)  # faulthandler prints all stacks
            status = self.wait(PATIENCE)
        assert status is not None, "the process outlives SIGABRT"
        return Ended(
            status, *((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        )


def _sys_path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


def import_path() -> str:
    """Return PYTHONPATH for new interpreters that import modules of these tests."""
    tests = Path(__file__).parent
    paths = [path for path in _sys_path() if Path(path).is_relative_to(tests)]
    return os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))


def dump_stacks(processes: Iterable[Process]) -> None:
    """Make each running process write its threads' stacks into its log."""
    for process in processes:
        process.signal(signal.SIGUSR1)
    time.sleep(0.5)  # the handlers write


def ending(exitcode: int | None) -> str:
    """Return how a process has ended, as text."""
    if exitcode is None:
        return "channel closed, process still there"
    return f"signal {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


_default: Launcher | None = None


def default() -> Launcher:
    """Return the launcher with this process's environment, starting it if there is none."""
    global _default
    if _default is None or not _default.alive:
        _default = Launcher(preload=[*TORCH, *MORE])
    return _default


def close_default() -> None:
    """End the default launcher, if there is one."""
    global _default
    if _default is not None:
        _default.close()
        _default = None
