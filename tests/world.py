"""Ranks that stay alive from test to test.

``world(3).run(function, *arguments)`` runs a module-level function on three ranks and returns the
three return values in rank order. A world starts when a test first requests its size, and serves all
later tests. If a call fails, the world ends, and the next test gets a new one.
"""

import contextlib
import inspect
import os
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import launcher
import pytest
import torch.distributed as dist
from backend import BACKEND
from rank import Call, here, serve
from ranks import GRACE, Ranks

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


class World(Ranks):
    """Living ranks of one world size, which serve calls."""

    _calls = 0
    _kept: str | None = None  # name of the group that calls share

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        init: bool = True,
        fresh: bool = False,
        kill: bool = False,
        deadline: float | None = None,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Run ``function(*arguments)`` on all ranks and return their values in rank order.

        Args:
            function: a function of a module; no lambda, no nested function.
            arguments: anything that pickles.
            init: whether there is a default group; without one, use ``here()`` for the rank.
            fresh: whether this group is made for this call and destroyed after it; else one
                group serves many calls, and the call must not destroy it.
            kill: whether to end the ranks after the call, because it makes changes that cannot be undone.
            deadline: see ``hear_all``, as for ``dying``, after which the world ends.
        """
        __tracebackhide__ = True
        self._calls += 1
        self._what = function.__qualname__
        keep = init and not fresh
        group = str(self._calls) if init else None
        if keep:
            group = self._kept or group
        self._kept = group if keep else None
        scratch = self.folder / f"call{self._calls}"
        call = pickle.dumps(Call(function, arguments, group, keep, scratch))
        scratch.mkdir()
        self._log_starts = {rank: _size(log) for rank, log in self._logs.items()}
        self.tell_all(call)
        lives = False
        try:
            answers = self.hear_all(deadline, dying=dying)
            lives = not (kill or dying)
        finally:
            # After Ctrl-C, too, or pytest's time limit: answers are still outstanding.
            if not lives:
                self.close()
        return list(answers.values())

    def finish(self) -> None:
        """End the ranks; kill and report those that do not end by themselves."""
        if self._closed:
            return
        self._what = "the end of a world"
        self.tell_all(None)
        try:
            self.ended_well(GRACE)
        finally:
            self.close()


class Worlds:
    """The worlds of a test session, by size.

    Args:
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
                world.close()
            folder = Path(tempfile.mkdtemp(prefix=f"world{size}-", dir=self._folder))
            world = self._worlds[size] = World(
                self._own or launcher.default(),
                *(serve, self._prepare),
                size=size,
                folder=folder,
                store_port=self._store.port,
                prefix=f"{folder.name}/",
                environment=self._environ,
            )
        return world

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Run a function on the living world of ``size`` ranks; see ``World.run``."""
        __tracebackhide__ = True
        self(size).run(function, *arguments, **options)

    def close(self) -> None:
        """End all ranks; raise the first failure after the last world is closed."""
        with contextlib.ExitStack() as stack:
            if self._own is not None:
                stack.callback(self._own.close)
            for world in self._worlds.values():
                stack.callback(world.finish)


def worlds_fixture(*needs: str, scope: Any = "session", **options: Any) -> Any:
    """Return a fixture of ``Worlds`` with these options; the fixtures that it ``needs`` are there first."""

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
