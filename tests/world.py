"""Ranks that stay alive from test to test.

``world(3).run(function, *arguments)`` runs a module-level function on three ranks and returns the
three return values in rank order. A launcher (launcher.py) forks the ranks. A world starts when a test
first requests its size, and serves all later tests. If a rank raises, dies or does not answer by the
deadline, the test fails with traceback, stacks and log, and the world ends; the next test gets a new
one. Only processes started here are killed.
"""

import contextlib
import inspect
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import launcher
import pytest
import torch.distributed as dist
from backend import BACKEND
from world_rank import Call, Function, here, serve

DEADLINE = 90.0
"""Seconds that a call may take."""

GRACE = 15.0
"""Seconds for the other ranks to answer after one failed, and for a rank to end."""

DIED = "died: "
"""Prefix of a rank's failure if its process ended without an answer."""

AT_IMPORT = ("FASTCOLL_DEFAULT", "FASTCOLL_REPLACE")
"""The variables of fastcoll that are read when torch is imported; others are read when a group is made."""


def _is_late(name: str, value: str) -> bool:
    """Return whether this variable can still be set in a fork of a process with torch loaded."""
    given = os.environ.get(name) == value
    return given or (name.startswith(("FASTCOLL_", "DDP_")) and name not in AT_IMPORT)


def init_group(
    name: str = "store", seconds: float = 30.0, backend: str = BACKEND, **options: Any
) -> None:
    """Make the default group on ranks that run without one; they meet in a file of this name."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(here().scratch / name), here().size),
        rank=here().rank,
        world_size=here().size,
        timeout=timedelta(seconds=seconds),
        **options,
    )


class RanksFailed(AssertionError):
    """Ranks failed; the text has the failure of each."""


class World:
    """Living ranks of one world size."""

    def __init__(
        self,
        size: int,
        store_port: int,
        folder: Path,
        prepare: Callable[[], None] | None = None,
        environ: Mapping[str, str] | None = None,
        starts: launcher.Launcher | None = None,
    ) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix=f"world{size}-", dir=folder))
        self.logs = [self.folder / f"rank{rank}.log" for rank in range(size)]
        self._log_starts = [0] * size
        self._calls = 0
        self._kept_prefix: str | None = None
        self._pipes: list[connection.Connection] = []
        self._processes: list[launcher.Process] = []
        starts = starts or launcher.default()
        for rank, log in enumerate(self.logs):
            ours, theirs = connection.Pipe()
            with theirs:
                process = starts.start(
                    *(serve, rank, size, store_port, BACKEND, prepare),
                    log=log,
                    channel=theirs,
                    environment=environ,
                )
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether every rank can take a call."""
        return bool(self._processes) and all(
            process.launcher.alive and process.exitcode is None for process in self._processes
        )

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        init: bool = True,
        fresh: bool = False,
        deadline: float = DEADLINE,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Run ``function(*arguments)`` on all ranks and return their values in rank order.

        Args:
            function: a function of a module; no lambda, no nested function.
            arguments: anything that pickles.
            init: whether there is a default group; without one, use ``here()`` for the rank.
            fresh: whether this group is made for this call and destroyed after it; else one
                group serves many calls, and the call must not destroy it.
            deadline: seconds.
            dying: ranks that shall die in this call; their value is None, and the world ends.

        Raises:
            RanksFailed: a rank raised, died, or did not answer in time.
        """
        __tracebackhide__ = True
        message = self._message(function, arguments, init, fresh)
        self._log_starts = [_size(log) for log in self.logs]
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(message)
        try:
            answers, failures = self._wait(deadline, dying)
        except BaseException:  # Ctrl-C, or pytest's time limit: answers are still outstanding
            self.kill()
            raise
        if failures:
            self.kill()
        for rank in dying:
            if rank in answers:
                failures[rank] = "was to die in this call and did not"
            elif failures[rank].startswith("died"):
                del failures[rank]
        if failures:
            raise RanksFailed(self._report(function, failures))
        return [answers.get(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks; kill and report those that do not end by themselves."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        end = time.monotonic() + GRACE
        for process in self._processes:
            process.wait(max(0.0, end - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self._processes) if process.exitcode is None]
        failures = dict.fromkeys(stuck, "did not end when asked to")
        for rank, process in enumerate(self._processes):
            if process.exitcode:
                failures[rank] = f"ended with {launcher.ending(process.exitcode)}"
        if stuck:
            launcher.dump_stacks(self._processes[rank] for rank in stuck)
        self.kill()
        if failures:
            raise RanksFailed(self._report(self.close, failures))

    def kill(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _message(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], init: bool, fresh: bool
    ) -> bytes:
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} must stand at the top of a module")
        self._calls += 1
        scratch = self.folder / f"call{self._calls}"
        scratch.mkdir()
        keep = init and not fresh
        prefix = f"{self.folder.name}/{self._calls}/" if init else None
        if keep:
            prefix = self._kept_prefix = self._kept_prefix or prefix
        else:
            self._kept_prefix = None
        name = Function.of(function)
        return pickle.dumps(
            Call(name, pickle.dumps(arguments), prefix, keep, str(scratch), tuple(sys.path))
        )

    def _wait(
        self, deadline: float, dying: Collection[int]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the values of the ranks that answered, and the failures of the others."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end, silence = time.monotonic() + deadline, f"no answer in time (deadline {deadline:g} s)"
        while waiting := {
            pipe: rank
            for rank, pipe in enumerate(self._pipes)
            if rank not in answers and rank not in failures
        }:
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), silence)
                launcher.dump_stacks(self._processes[rank] for rank in waiting.values())
                break
            for pipe in ready:
                self._receive(waiting[pipe], answers, failures)
            if failures.keys() - set(dying) and time.monotonic() + GRACE < end:
                end = time.monotonic() + GRACE
                silence = f"no answer within {GRACE:g} s of the first failure"
        return answers, failures

    def _receive(self, rank: int, answers: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            worked, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            failures[rank] = f"{DIED}{launcher.ending(self._processes[rank].wait(GRACE))}"
        else:
            (answers if worked else failures)[rank] = value

    def _report(self, function: Callable[..., Any], failures: dict[int, str]) -> str:
        lines = [f"{function.__qualname__} on {self.size} ranks of {BACKEND}:"]
        for rank in sorted(failures):
            lines += [f"---- rank {rank}", failures[rank].rstrip()]
            # A process that died before the call logged the reason before it.
            start = 0 if failures[rank].startswith(DIED) else self._log_starts[rank]
            log = self.logs[rank].read_bytes()[start:].decode(errors="replace")
            if log.strip():
                lines += [f"---- rank {rank}, end of its log", log[-4000:].rstrip()]
        return "\n".join(lines)


class Worlds:
    """The worlds of a test session, by size.

    Args:
        folder: folder of logs and scratch directories.
        prepare: a function of a module that every rank calls once, first.
        environ: variables of the ranks, beside this process's. Variables that must be set before torch is
            loaded need a separate launcher.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prepare: Callable[[], None] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._prepare = prepare
        self._environ = environ
        late = all(_is_late(*variable) for variable in (environ or {}).items())
        self._own = None if late else launcher.Launcher(environ)
        (self._own or launcher.default()).wait()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """Return the living world of ``size`` ranks, starting it if there is none."""
        world = self._worlds.get(size)
        if world is None or not world.alive:
            if world is not None:
                world.kill()
            world = World(
                size, self._store.port, self._folder, self._prepare, self._environ, self._own
            )
            self._worlds[size] = world
        return world

    def close(self) -> None:
        """End all ranks; raise the first failure after the last world is closed."""
        with contextlib.ExitStack() as stack:
            if self._own is not None:
                stack.callback(self._own.close)
            for world in self._worlds.values():
                stack.callback(world.close)


def worlds_fixture(*needs: str, scope: Any = "session", **options: Any) -> Any:
    """Return a fixture of worlds.

    Args:
        needs: fixtures that must be there first.
        scope: when the worlds end.
        options: options for ``Worlds``.
    """

    def worlds(tmp_path_factory: pytest.TempPathFactory, **_: Any) -> Iterator[Worlds]:
        made = Worlds(tmp_path_factory.mktemp("worlds"), **options)
        yield made
        made.close()

    # pytest reads the names of fixtures there.
    names = ("tmp_path_factory", *needs)
    worlds.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return pytest.fixture(scope=scope)(worlds)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
