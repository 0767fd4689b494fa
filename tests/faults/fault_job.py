"""The test's side of ranks that are to be killed, stopped and interrupted.

``jobs(size, scenario, *arguments)`` starts ``scenario(rank, *arguments)`` in ``size`` processes of
their own (see fault_rank.py). Every wait has an end; what a rank printed is in the failure. When
the test is over, each rank that was not killed must end with exit code 0; no process of a rank and no file of a rank
in /dev/shm may be left.
"""

import contextlib
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch.distributed as dist
from fault_rank import Call, run
from launcher import Launcher, Process, dump_stacks
from suite_rules import slack
from world_rank import Function

DEADLINE = 60.0 if slack() > 1.0 else 12.0
"""Seconds to wait for what a rank is to say, far above every bound that a test asserts."""


class JobFailed(AssertionError):
    """A rank raised, ended, or said nothing in time.

    Attributes:
        how: "raised", "ended" or "silent".
    """

    def __init__(self, text: str, how: str) -> None:
        super().__init__(text)
        self.how = how


class Job:
    """Some ranks that run one scenario."""

    def __init__(
        self,
        launcher: Launcher,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        ranks: Iterable[int],
        environment: dict[str, str],
        real_exits: Collection[int],
        hosts: Sequence[str] = (),
        **common: Any,
    ) -> None:
        name = Function.of(function)
        folder = Path(common["folder"])
        self.ranks = list(ranks)
        self.on_one_host = len(set(hosts or "")) <= 1
        self.prefix: str = common["prefix"]
        self._processes: dict[int, Process] = {}
        self._channels: dict[int, connection.Connection] = {}
        self._logs: dict[int, Path] = {}
        self._killed: set[int] = set()
        self._seen_end: set[int] = set()
        for index, rank in enumerate(self.ranks):
            ours, theirs = connection.Pipe()
            log = folder / f"process{index}.log"
            host = {"FASTCOLL_HOST_ID": f"host {hosts[rank]}"} if hosts else {}
            with theirs:
                process = launcher.start(
                    *(run, Call(name, arguments, rank, **common)),
                    log=log,
                    channel=theirs,
                    environment={**host, **environment},
                    real_exit=rank in real_exits,
                )
            # Two processes may be given one rank; they are told apart by their place in the list.
            key = rank if rank not in self._processes else index
            self._processes[key], self._channels[key], self._logs[key] = process, ours, log

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def name(self, rank: int) -> str:
        """Return the words by which an error names a rank."""
        return f"rank {rank} (pid {self.pids[rank]}, "

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

    def go(self) -> None:
        """Wait until all ranks are ready, and tell them to go on."""
        self.hear_all()
        self.tell_all()

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return when."""
        now = time.monotonic()
        os.kill(self._processes[rank].pid, number)
        if number == signal.SIGKILL:
            self._killed.add(rank)
        return now

    def kill(self, rank: int) -> float:
        """Kill a rank; return when."""
        return self.signal(rank, signal.SIGKILL)

    def end(self, rank: int, timeout: float = DEADLINE) -> int:
        """Wait for the end of a rank and return its exit code, negative for a signal."""
        code = self._processes[rank].wait(timeout)
        self._seen_end.add(rank)
        if code is None:
            dump_stacks(self._processes.values())
            self._fail(f"rank {rank} has not ended within {timeout:g} s", "silent")
        return code

    def ended_well(self) -> None:
        """Wait for the end of the ranks that the test neither killed nor saw end; each must end with exit code 0."""
        rest = self.pids.keys() - self._killed - self._seen_end
        codes = {rank: self.end(rank) for rank in sorted(rest)}
        if any(codes.values()):
            self._fail(f"exit codes by rank: {codes}", "ended")

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
            self._processes[rank].wait(DEADLINE)
        running = [r for r, process in self._processes.items() if process.exitcode is None]
        for rank in running:
            self._processes[rank].kill()
        for channel in self._channels.values():
            channel.close()
        return running

    def _hear(self, rank: int, end: float) -> Any:
        channel = self._channels[rank]
        if not channel.poll(max(0.0, end - time.monotonic())):
            dump_stacks(self._processes.values())
            self._fail(f"rank {rank} says nothing", "silent")
        try:
            what, value = pickle.loads(channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._processes[rank].wait(DEADLINE)
            self._fail(f"rank {rank} ended with {code}", "ended")
        if what == "raised":
            self._fail(f"rank {rank} raised\n{value}", "raised")
        return value

    def _fail(self, text: str, how: str) -> NoReturn:
        """Raise what a rank did instead of answering; skip the test if one could not inject its fault, says a log."""
        text = f"{text}\n{self.logs()}"
        if reason := re.search(r"^(?:\w+\.)*Skipped: (.*)", text, re.MULTILINE):
            self.close()  # ranks may wait for that one
            self._seen_end.update(self.pids)
            pytest.skip(reason[1])
        raise JobFailed(text, how)


class Jobs:
    """Starts the jobs of one test."""

    def __init__(
        self,
        launcher: Launcher,
        store: dist.TCPStore,
        folder: Path,
        pretended_hosts: int = 1,
    ) -> None:
        self._launcher, self.store, self._folder = launcher, store, folder
        self._pretended_hosts = pretended_hosts
        self._jobs: list[Job] = []

    def __call__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        hosts: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        prefix: str | None = None,
        real_exits: Collection[int] = (),
    ) -> Job:
        """Start ``function(rank, *arguments)`` on the ranks, by default all.

        Args:
            size: the world size that the ranks believe in.
            function: at the top of a module.
            arguments: anything that pickles.
            ranks: those that are started, by default all.
            hosts: the pretended host of each rank, as in "0011"; by default the first half of two hosts' ranks is on
                one, and so on.
            environment: variables that are set before all else.
            prefix: that of an earlier job, to meet what it left in the store.
            real_exits: ranks that end as a Python program does, which takes half a second of processor time; see
                ``Launcher.start``.
        """
        folder = self._folder / f"job{len(self._jobs)}"
        folder.mkdir()
        if not hosts and self._pretended_hosts > 1:
            hosts = [str(rank * self._pretended_hosts // size) for rank in range(size)]
        job = Job(
            self._launcher,
            function,
            arguments,
            range(size) if ranks is None else ranks,
            environment=environment or {},
            hosts=hosts,
            real_exits=real_exits,
            size=size,
            prefix=f"{folder}/" if prefix is None else prefix,
            store=("127.0.0.1", self.store.port),
            folder=str(folder),
        )
        self._jobs.append(job)
        return job

    def key(self, job: Job, pattern: str) -> str:
        """Wait until a rank of the job has set a key of the store that matches; return the whole key."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            for key in self.store.list_keys():
                if job.prefix in key and re.search(pattern, key):
                    return key
            time.sleep(0.01)
        raise JobFailed(f"expected a key like {pattern}, got none in {DEADLINE:g} s", "silent")

    def ended_well(self) -> None:
        """Wait for the end of all ranks; see ``Job.ended_well``."""
        for job in self._jobs:
            job.ended_well()

    def close(self) -> list[str]:
        """Clean up; return what was left."""
        pids = {pid for job in self._jobs for pid in job.pids.values()}
        found = [
            f"job {i} left ranks {r} running" for i, j in enumerate(self._jobs) if (r := j.close())
        ]
        # A rank leads a session of its own: what it started is in it.
        if orphans := _processes_of_sessions(pids):
            found.append(f"processes {orphans}")
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        files = os.listdir("/dev/shm")  # of other processes, too: theirs have other numbers
        if left := [file for file in files if pids & set(map(int, re.findall(r"\d+", file)))]:
            found.append(f"in /dev/shm {left}")
        return found


def _processes_of_sessions(sessions: set[int]) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
