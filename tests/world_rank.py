"""The process of one rank of the ``world`` fixture: it waits for calls and answers them.

The messages are pickled by hand, not by ``Connection.send``: torch changes the pickler of that method
to move tensors through shared memory.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=60)
"""Timeout of the groups, below the deadline of a call, so that a hang shows the backend's error."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A module-level function, identified by its file."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Function":
        """Return the function's name for another process."""
        code = inspect.unwrap(function).__code__
        return cls(function.__module__, code.co_filename, function.__qualname__)

    def load(self) -> Any:
        """Return the function, importing its file if this process has not done so."""
        module = sys.modules.get(self.module)
        if module is None or getattr(module, "__file__", None) != self.file:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None, self.file
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[self.module]
                raise
        found: Any = module
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found


@dataclasses.dataclass(frozen=True)
class Call:
    """One function to run on every rank.

    ``prefix`` is new for every process group; None means a call without a group.
    """

    function: Function
    arguments: bytes
    prefix: str | None
    keep_group: bool
    scratch: str
    sys_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Here:
    """The rank on which a function of ``world(n).run`` runs."""

    rank: int
    size: int
    scratch: Path
    """Empty directory of this call, the same for all ranks."""


_here: Here | None = None


def here() -> Here:
    """Return rank, world size and scratch directory; for functions run with ``init=False``."""
    assert _here is not None, "here() is for functions that world(n).run calls"
    return _here


def serve(
    pipe: connection.Connection,
    rank: int,
    size: int,
    store_port: int,
    backend: str,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Answer calls until the pipe ends or None arrives."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    current_prefix: str | None = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        call: Call | None = pickle.loads(message)
        if call is None:
            break
        environment = dict(os.environ)
        try:
            if call.prefix != current_prefix:
                _destroy()
                if call.prefix is not None:
                    dist.init_process_group(
                        backend,
                        store=dist.PrefixStore(call.prefix, store),
                        rank=rank,
                        world_size=size,
                        timeout=GROUP_TIMEOUT,
                    )
                current_prefix = call.prefix
            environment = dict(os.environ)  # making a group sets variables for torch's DDP
            value = _run(call, rank, size)
            if call.keep_group:
                assert dist.is_initialized(), "destroys the group: say fresh=True or init=False"
                _destroy_subgroups()
            else:
                _destroy()
                current_prefix = None
            answer = pickle.dumps((True, value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        finally:
            os.environ.clear()
            os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(answer)
    _destroy()


def _run(call: Call, rank: int, size: int) -> Any:
    import torch

    global _here
    _here = Here(rank, size, Path(call.scratch))
    torch.manual_seed(0)
    try:
        for folder in call.sys_path:
            if folder not in sys.path:
                sys.path.append(folder)
        arguments = pickle.loads(call.arguments)
        return call.function.load()(*arguments)
    finally:
        _here = None


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _destroy_subgroups() -> None:
    """Destroy the groups beside the default one that a call left behind."""
    import torch.distributed as dist

    known = dist.distributed_c10d._world.pg_map
    for group in [group for group in known if group is not dist.group.WORLD]:
        with contextlib.suppress(ValueError):  # destroyed together with another one
            dist.destroy_process_group(group)
