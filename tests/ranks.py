"""Ranks in processes of their own, as a test sees them.

``Ranks`` starts the processes from a launcher (launcher.py). Each has a channel, by which test and rank send each
other values, and a log. Every wait has an end. If a rank raises, dies or sends nothing in time, the test fails with
what each of them did, the stacks of all, and the logs. Only processes started here are killed.
"""

import contextlib
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
from backend import BACKEND
from launcher import Launcher, Process, dump_stacks, ending
from rank import DEADLINE, Rank, run
from suite_rules import paused, slack

GRACE = 15.0
"""Seconds for the other ranks to answer after one failed, and for a rank to end."""


class RanksFailed(AssertionError):
    """Ranks failed; the text has the failure of each, and the logs.

    ``how`` is what the first did: "raised", "ended" or "silent".
    """

    def __init__(self, text: str, how: str) -> None:
        super().__init__(text)
        self.how = how


class Limit:
    """A time limit, by default ``DEADLINE``; seconds for which the whole machine stands still are added."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = DEADLINE * slack() if seconds is None else seconds
        self._end = time.monotonic() + self.seconds - paused()

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._end + paused() - time.monotonic())


class Ranks:
    """Some ranks, each of which runs a function.

    Args:
        function: a function of a module, called with the rank and ``arguments`` on each.
        arguments: anything that pickles. They may import what ``function``'s module may.
        folder: for the logs; the ranks' scratch folder.
        store_port: of a store at 127.0.0.1.
        prefix: of these ranks' keys in the store; those of an earlier job to meet what it left.
        ranks: those that are started, by default all.
        hosts: the pretended host of each rank, as in "0011".
        environment: variables that are set before all else.
        real_exits: ranks that end as a Python program does, which takes half a second of processor time; see
            ``Launcher.start``.
    """

    kind = Rank
    """What a rank is in its own process."""

    def __init__(
        self,
        launcher: Launcher,
        function: Callable[..., Any],
        *arguments: Any,
        size: int,
        folder: Path,
        store_port: int,
        prefix: str,
        ranks: Iterable[int] | None = None,
        hosts: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        real_exits: Collection[int] = (),
    ) -> None:
        self.size, self.folder, self.prefix = size, folder, prefix
        self.on_one_host = len(set(hosts)) <= 1
        self._what = function.__qualname__
        self._processes: dict[int, Process] = {}
        self._channels: dict[int, connection.Connection] = {}
        self._logs: dict[int, Path] = {}
        self._log_starts: dict[int, int] = {}
        self._done: set[int] = set()  # ranks that the test killed, or saw end
        self._closed = False
        call = pickle.dumps((function, arguments))
        for index, rank in enumerate(range(size) if ranks is None else ranks):
            ours, theirs = connection.Pipe()
            log = folder / f"process{index}.log"
            host = {"FASTCOLL_HOST_ID": f"host {hosts[rank]}"} if hosts else {}
            with theirs:
                process = launcher.start(
                    *(run, call, self.kind),
                    *(rank, size, folder, ("127.0.0.1", store_port), prefix),
                    log=log,
                    channel=theirs,
                    environment={**host, **(environment or {})},
                    real_exit=rank in real_exits,
                )
            # Two processes may be given one rank; they are told apart by their place in the list.
            key = rank if rank not in self._processes else index
            self._processes[key], self._channels[key], self._logs[key] = process, ours, log

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def alive(self) -> bool:
        """Whether every rank runs."""
        return all(process.running for process in self._processes.values())

    def name(self, rank: int) -> str:
        """Return the words by which an error names a rank."""
        return f"rank {rank} (pid {self.pids[rank]}, "

    def tell(self, *ranks: int, value: Any = None) -> None:
        """Send a value to ranks. If one has ended, what it is awaited for next reports that."""
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):
                self._channels[rank].send_bytes(pickle.dumps(value))

    def tell_all(self, value: Any = None) -> None:
        """Send the same to all ranks."""
        self.tell(*self.pids, value=value)

    def hear(self, rank: int, timeout: float | None = None) -> Any:
        """Return the next value that the rank sends, or returns at its end."""
        return self._hear([rank], timeout)[rank]

    def hear_all(
        self, timeout: float | None = None, but: Collection[int] = (), dying: Collection[int] = ()
    ) -> dict[int, Any]:
        """Return the next value of each rank, by rank; raise RanksFailed if one raises, dies, or sends nothing in time.

        The ranks of ``but`` are not awaited. Those of ``dying`` must die instead; their value is None. ``timeout`` is
        ``DEADLINE`` with the suite's slack by default.
        """
        return self._hear([rank for rank in self.pids if rank not in but], timeout, dying)

    def go(self) -> None:
        """Wait until all ranks are ready, and tell them to go on."""
        self.hear_all()
        self.tell_all()

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return when."""
        now = time.monotonic()
        os.kill(self._processes[rank].pid, number)
        if number == signal.SIGKILL:
            self._done.add(rank)
        return now

    def kill(self, rank: int) -> float:
        """Kill a rank; return when."""
        return self.signal(rank, signal.SIGKILL)

    def end(self, rank: int, timeout: float | None = None) -> int:
        """Wait for the end of a rank and return its exit code, negative for a signal."""
        return self._ends([rank], timeout)[rank]

    def ended_well(self, timeout: float | None = None) -> None:
        """Wait for the end of the ranks that the test neither killed nor saw end; each must end with exit code 0."""
        codes = self._ends(self.pids.keys() - self._done, timeout)
        if bad := {rank: ("ended", f"ended with {ending(c)}") for rank, c in codes.items() if c}:
            self._fail(bad)

    def log(self, rank: int) -> str:
        """Return what a rank printed."""
        return self._logs[rank].read_text(errors="replace")

    def logs(self) -> str:
        """Return what the ranks printed, as reports show it."""
        parts = []
        for rank, log in self._logs.items():
            text = log.read_bytes()[self._log_starts.get(rank, 0) :].decode(errors="replace")
            if text.strip():
                parts.append(f"---- rank {rank}, end of its log\n{text.strip()[-6000:]}")
        return "\n".join(parts)

    def close(self) -> list[int]:
        """Kill what still runs; return the ranks that did.

        A rank that a test killed is given time to end: the kernel takes its memory apart first,
        while its peers may have noticed its death, and ended, already.
        """
        self._closed = True
        limit = Limit(None)
        for rank in self._done:
            if self._processes[rank].running:
                self._processes[rank].wait(limit.left())
        running = [rank for rank, process in self._processes.items() if process.running]
        for process in self._processes.values():
            process.kill()
        for channel in self._channels.values():
            channel.close()
        return running

    def _ends(self, ranks: Iterable[int], timeout: float | None) -> dict[int, int]:
        """Wait for the end of ranks; return the exit code of each."""
        limit = Limit(timeout)
        codes: dict[int, int] = {}
        late = {}
        for rank in sorted(ranks):
            while (code := self._processes[rank].wait(limit.left())) is None and limit.left():
                pass
            if code is None:
                late[rank] = "silent", f"has not ended within {limit.seconds:g} s"
            else:
                codes[rank] = code
                self._done.add(rank)
        if late:
            self._fail(late)
        return codes

    def _hear(
        self, ranks: list[int], timeout: float | None, dying: Collection[int] = ()
    ) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        limit, of = Limit(timeout), "deadline {:g} s"
        while waiting := [rank for rank in ranks if rank not in answers.keys() | failures.keys()]:
            channels = {self._channels[rank]: rank for rank in waiting}
            ready = connection.wait(list(channels), limit.left())
            if not ready and limit.left() == 0.0:
                text = f"no answer in time ({of.format(limit.seconds)})"
                failures |= dict.fromkeys(waiting, ("silent", text))
            for channel in ready:
                rank = channels[channel]
                how, value = self._receive(rank)
                if (how == "ended") if rank in dying else (how == "sent"):
                    answers[rank] = None if rank in dying else value
                elif how == "sent":
                    failures[rank] = how, "was to die in this call and did not"
                else:
                    failures[rank] = how, value
            if failures and limit.left() > GRACE:
                limit, of = Limit(GRACE), "{:g} s after the first failure"
        if failures:
            self._fail(failures)
        return {rank: answers[rank] for rank in ranks}

    def _receive(self, rank: int) -> tuple[str, Any]:
        """Return what a rank did: ("sent", value), ("raised", traceback) or ("ended", how)."""
        try:
            worked, value = pickle.loads(self._channels[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._log_starts[rank] = 0  # the reason may have been logged long before
            return "ended", f"died: {ending(self._processes[rank].wait(GRACE))}"
        return ("sent" if worked else "raised"), value

    def _fail(self, failures: Mapping[int, tuple[str, str]]) -> NoReturn:
        """Report what ranks did instead of answering. If one could not inject its fault, the test is skipped."""
        if any(how == "silent" for how, _ in failures.values()):
            dump_stacks(self._processes.values())
        lines = [f"{self._what} on {self.size} ranks of {BACKEND}:"]
        for rank in sorted(failures):
            lines += [f"---- rank {rank}", failures[rank][1].rstrip()]
        text = "\n".join([*lines, self.logs()])
        if reason := re.search(r"^(?:\w+\.)*Skipped: (.*)", text, re.MULTILINE):
            self.close()  # ranks may wait for that one
            self._done.update(self.pids)
            pytest.skip(reason[1])
        raise RanksFailed(text, next(iter(failures.values()))[0])
