"""The test's side of ranks that are to be killed, stopped and interrupted.

``jobs(size, scenario, *arguments)`` starts ``scenario(rank, *arguments)`` in ``size`` processes of
their own (see fault_rank.py). Every wait has an end; what a rank printed is in the failure. When
the test is over, no rank, no process of a rank and no file in /dev/shm may be left.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fault_rank import Call
from world_rank import Function

__all__ = ["Job", "JobFailed", "Jobs", "Launcher"]

DEADLINE = 20.0
"""Seconds to wait for what a rank is to say, far above every bound that a test asserts."""

SHARED_MEMORY = Path("/dev/shm")


class JobFailed(AssertionError):
    """A rank raised, ended, or said nothing in time.

    Attributes:
        how: "raised", "ended", "silent", or "broken" where it is the launcher's fault.
    """

    def __init__(self, text: str, how: str = "broken") -> None:
        super().__init__(text)
        self.how = how


class Launcher:
    """The process that forks the ranks.

    Args:
        environment: variables of the launcher and all its ranks, beside those of this process.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = Path(__file__).parent
        paths = [
            *[str(here), str(here / "matrix"), str(here / "soak"), str(here.parent)],
            os.environ.get("PYTHONPATH", ""),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(here / "fault_launcher.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
        )
        theirs.close()
        self._statuses: dict[int, int] = {}
        self._started: list[int] = []
        self._ready = False

    def start(self, message: bytes, channel: int, log: int) -> int:
        """Fork a rank and return its process id."""
        while not self._ready:
            self._receive(60.0)
        socket.send_fds(self._socket, [message], [channel, log])
        while not self._started:
            self._receive(60.0)
        return self._started.pop()

    def status(self, pid: int, timeout: float) -> int | None:
        """Return the exit code, negative for a signal, or None if it has not ended in time."""
        end = time.monotonic() + timeout
        while pid not in self._statuses and (left := end - time.monotonic()) > 0:
            self._receive(left, must=False)
        while pid not in self._statuses and self._receive(0.0, must=False):
            pass
        return self._statuses.get(pid)

    def close(self) -> None:
        """End the launcher, and with it all ranks."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()

    def _receive(self, timeout: float, must: bool = True) -> bool:
        if not select.select([self._socket], [], [], max(0.0, timeout))[0]:
            if must:
                raise JobFailed("the launcher of ranks does not answer")
            return False
        data = self._socket.recv(1 << 16)
        if not data:
            raise JobFailed(f"the launcher of ranks ended with {self._process.wait()}")
        what, *values = pickle.loads(data)
        if what == "ready":
            self._ready = True
        elif what == "started":
            self._started.append(values[0])
        else:
            self._statuses[values[0]] = os.waitstatus_to_exitcode(values[1])
        return True


class Job:
    """Some ranks that run one scenario."""

    def __init__(
        self,
        launcher: Launcher,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        ranks: Iterable[int],
        **common: Any,
    ) -> None:
        code = function.__code__
        name = Function(function.__module__, code.co_filename, function.__qualname__)
        self._launcher = launcher
        self._folder = Path(common["folder"])
        self.ranks = list(ranks)
        self.pids: dict[int, int] = {}
        self._channels: dict[int, connection.Connection] = {}
        self._logs: dict[int, Path] = {}
        self._killed: set[int] = set()
        for index, rank in enumerate(self.ranks):
            call = Call(name, arguments, rank, **common)
            ours, theirs = connection.Pipe()
            log = self._folder / f"process{index}.log"
            with open(log, "ab") as file:
                pid = launcher.start(pickle.dumps(call), theirs.fileno(), file.fileno())
            theirs.close()
            # Two processes may be given one rank; they are told apart by their place in the list.
            key = rank if rank not in self.pids else index
            self.pids[key], self._channels[key], self._logs[key] = pid, ours, log

    def tell(self, rank: int, value: Any = None) -> None:
        """Say something to a rank."""
        self._channels[rank].send_bytes(pickle.dumps(value))

    def tell_all(self, value: Any = None) -> None:
        """Say the same to all ranks."""
        for rank in self.pids:
            self.tell(rank, value)

    def hear(self, rank: int, timeout: float = DEADLINE) -> Any:
        """Return what the rank tells, or returns at its end."""
        return self._hear(rank, time.monotonic() + timeout)

    def hear_all(self, timeout: float = DEADLINE, but: Iterable[int] = ()) -> dict[int, Any]:
        """Return what each rank tells, by rank."""
        end = time.monotonic() + timeout
        return {rank: self._hear(rank, end) for rank in self.pids if rank not in set(but)}

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return when."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        if number == signal.SIGKILL:
            self._killed.add(rank)
        return now

    def kill(self, rank: int) -> float:
        """Kill a rank; return when."""
        return self.signal(rank, signal.SIGKILL)

    def end(self, rank: int, timeout: float = DEADLINE) -> int:
        """Wait for the end of a rank and return its exit code, negative for a signal."""
        code = self._launcher.status(self.pids[rank], timeout)
        if code is None:
            self._dump_stacks()
            raise JobFailed(
                f"rank {rank} has not ended within {timeout:g} s\n{self.logs()}", "silent"
            )
        return code

    def ended_well(self, but: Iterable[int] = ()) -> None:
        """Wait for the end of all ranks; each must end by itself with exit code 0."""
        codes = {rank: self.end(rank) for rank in self.pids if rank not in set(but)}
        if any(codes.values()):
            raise JobFailed(f"exit codes by rank: {codes}\n{self.logs()}", "ended")

    def logs(self) -> str:
        """Return what the ranks printed."""
        parts = []
        for rank, log in self._logs.items():
            text = log.read_text(errors="replace").strip()
            if text:
                parts.append(f"---- rank {rank}, end of its log\n{text[-6000:]}")
        return "\n".join(parts)

    def log(self, rank: int) -> str:
        """Return what a rank printed."""
        return self._logs[rank].read_text(errors="replace")

    def close(self) -> list[int]:
        """Kill what still runs; return the ranks that did.

        A rank that a test killed is given time to end: the kernel takes its memory apart first,
        while its peers may have noticed its death, and ended, already.
        """
        for rank in self._killed:
            self._launcher.status(self.pids[rank], DEADLINE)
        running = [r for r, pid in self.pids.items() if self._launcher.status(pid, 0.0) is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank)
        for rank in running:
            self.end(rank)
        for channel in self._channels.values():
            channel.close()
        return running

    def _hear(self, rank: int, end: float) -> Any:
        channel = self._channels[rank]
        if not channel.poll(max(0.0, end - time.monotonic())):
            self._dump_stacks()
            raise JobFailed(f"rank {rank} says nothing\n{self.logs()}", "silent")
        try:
            what, value = pickle.loads(channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._launcher.status(self.pids[rank], 5.0)
            raise JobFailed(f"rank {rank} ended with {code}\n{self.logs()}", "ended") from None
        if what == "raised":
            raise JobFailed(f"rank {rank} raised\n{value}\n{self.logs()}", "raised")
        return value

    def _dump_stacks(self) -> None:
        for pid in self.pids.values():
            if self._launcher.status(pid, 0.0) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handlers write into the logs


class Jobs:
    """Starts the jobs of one test."""

    def __init__(self, launcher: Launcher, store: dist.TCPStore, folder: Path) -> None:
        self._launcher, self._store, self._folder = launcher, store, folder
        self._jobs: list[Job] = []
        self._files = _shared_files()

    def __call__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        environment: dict[str, str] | None = None,
        prefix: str | None = None,
        real_exit: bool = False,
    ) -> Job:
        """Start ``function(rank, *arguments)`` on the ranks, by default all.

        Args:
            size: the world size that the ranks believe in.
            function: at the top of a module.
            arguments: anything that pickles.
            ranks: those that are started, by default all.
            environment: variables that are set before the scenario runs.
            prefix: that of an earlier job, to meet what it left in the store.
            real_exit: whether the ranks end as a Python program does; see fault_rank.py.
        """
        folder = self._folder / f"job{len(self._jobs)}"
        folder.mkdir()
        job = Job(
            self._launcher,
            function,
            arguments,
            range(size) if ranks is None else ranks,
            size=size,
            prefix=f"{folder}/" if prefix is None else prefix,
            store=("127.0.0.1", self._store.port),
            folder=str(folder),
            environment=environment or {},
            real_exit=real_exit,
        )
        self._jobs.append(job)
        return job

    @property
    def port(self) -> int:
        """Where the store listens, on this host."""
        return int(self._store.port)

    def settle(self, seconds: float) -> None:
        """Give the ranks of all jobs that long, in all, to end by themselves."""
        end = time.monotonic() + seconds
        for job in self._jobs:
            for pid in job.pids.values():
                self._launcher.status(pid, max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Kill all ranks that still run."""
        for job in self._jobs:
            job.close()

    def close(self) -> list[str]:
        """Clean up; return what was left."""
        pids = [pid for job in self._jobs for pid in job.pids.values()]
        found = [
            f"job {i} left ranks {r} running" for i, j in enumerate(self._jobs) if (r := j.close())
        ]
        # A rank leads a session of its own: what it started is in it.
        if orphans := _processes_of_sessions(set(pids)):
            found.append(f"processes {orphans}")
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if files := {f for f in _shared_files() - self._files if not _has_user(f)}:
            found.append(f"in /dev/shm {files}")
        return found


def _shared_files() -> set[str]:
    return {str(path) for path in SHARED_MEMORY.rglob("*")}


def _has_user(file: str) -> bool:
    """Return whether a living process has the file open or mapped: then it is not a leak of ours."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if file in (process / "maps").read_text():
                return True
            if any(os.readlink(fd) == file for fd in (process / "fd").iterdir()):
                return True
    return False


def _processes_of_sessions(sessions: set[int]) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(int(process.name))
    return found
