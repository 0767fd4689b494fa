"""Ranks that are to be killed, stopped and interrupted.

``jobs(size, scenario, *arguments)`` starts ``scenario(rank, *arguments)`` in ``size`` processes of
their own (see fault_rank.py). When the test is over, each rank that was not killed must end with exit code 0; no
process of a rank and no file of a rank in /dev/shm may be left.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from fault_rank import After, Fault, Rank, as_test
from in_time import assert_raised, cause
from launcher import Launcher
from ranks import Limit, Ranks, RanksFailed
from suite_rules import bound

NAMED_MEMORY = "/dev/shm"


class Job(Ranks):
    """Some ranks that run one scenario."""

    kind = Rank

    def after_fault(
        self,
        answers: Mapping[int, tuple[Fault | None, After]],
        *said: str,
        names: Iterable[int] = (),
        kind: str = "DistBackendError",
        state: str = "COMM_ERROR",
        since: float | None = None,
        within: float | None = None,
    ) -> None:
        """Assert what every fault must show on each rank that answers its error and ``rank.recover(...)``.

        The next call raises at once, for the same cause. The group is destroyed within a second. Nothing of it is
        left, and a new one works.

        Args:
            answers: by rank.
            said: parts of each error, such as the call and what to do.
            names: ranks that each error names.
            state: of the group.
            kind: of the exception; for it, ``since`` and ``within`` see ``assert_raised``.
        """
        for fault, after in answers.values():
            said = *said, *map(self.name, names)
            assert_raised(fault, *said, since=since, within=within, kind=kind)
            assert "RuntimeError" in fault.bases, fault
            assert after.again is not None and after.again.seconds < bound(0.5), after
            told = _origin(fault).removesuffix(". Read the end of its log.")
            assert _origin(after.again).startswith(told), (after.again.text, fault.text)
            assert after.state == state, (after, fault)
            assert after.destroy < bound(1.0), after
            assert after.left == [], after


def _origin(fault: Fault) -> str:
    """Return the cause, without the rank whose connections between hosts met it first."""
    return re.sub(r"^rank \d+ \(.*?\): fastcoll\.init \[.*?\]: ", "", cause(fault))


class Jobs:
    """Starts the jobs of one test."""

    def __init__(
        self, launcher: Launcher, store: dist.TCPStore, folder: Path, pretended_hosts: int = 1
    ) -> None:
        self._launcher, self.store, self._folder = launcher, store, folder
        self._pretended_hosts = pretended_hosts
        self._jobs: list[Job] = []
        self._before = _shared_files()

    def __call__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        prefix: str | None = None,
        **options: Any,
    ) -> Job:
        """Start ``function(rank, *arguments)`` on the ranks.

        Args:
            size: the world size that the ranks believe in.
            prefix: that of an earlier job, to meet what it left in the store.
            options: ``ranks``, ``hosts``, ``environment``, ``real_exits``; see ``Ranks``. By default the first half of
                two hosts' ranks is on one, and so on.
        """
        folder = self._folder / f"job{len(self._jobs)}"
        folder.mkdir()
        if self._pretended_hosts > 1 and not options.get("hosts"):
            options["hosts"] = [str(rank * self._pretended_hosts // size) for rank in range(size)]
        job = Job(
            self._launcher,
            function,
            *arguments,
            size=size,
            folder=folder,
            store_port=self.store.port,
            prefix=f"{folder}/" if prefix is None else prefix,
            **options,
        )
        self._jobs.append(job)
        return job

    def ready(self, *arguments: Any, **options: Any) -> Job:
        """Start a job, and return it when each rank has said its first word."""
        job = self(*arguments, **options)
        job.hear_all()
        return job

    def run(self, size: int, test: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Run a test on the ranks of a job: one of its arguments may be the fixture ``rank``."""
        __tracebackhide__ = True
        self(size, as_test, test, *arguments, **options).hear_all()

    def key(self, job: Job, pattern: str) -> str:
        """Wait until a rank of the job has set a key of the store that matches; return the whole key."""
        limit = Limit(None)
        while limit.left():
            for key in self.store.list_keys():
                if job.prefix in key and re.search(pattern, key):
                    return key
            time.sleep(0.01)
        text = f"expected a key like {pattern}, got none in {limit.seconds:g} s"
        raise RanksFailed(text, "silent")

    def ended_well(self) -> None:
        """Wait for the end of all ranks; see ``Ranks.ended_well``."""
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
        new = {name for name, _ in _shared_files() - self._before}
        if left := sorted(name for name in new if _is_of_ranks(name, pids)):
            found.append(f"in {NAMED_MEMORY} {left}")
        return found


def _shared_files() -> set[tuple[str, int]]:
    """Return name and inode of each file in NAMED_MEMORY."""
    return {(entry.name, entry.inode()) for entry in os.scandir(NAMED_MEMORY)}


def _is_of_ranks(name: str, pids: set[int]) -> bool:
    """Return whether a new file in /dev/shm is of these processes. Fastcoll's own memory has no name there."""
    of_torch = re.match(r"torch_(\d+)_", name)
    return int(of_torch[1]) in pids if of_torch else "fastcoll" in name.lower()


def _processes_of_sessions(sessions: set[int]) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
