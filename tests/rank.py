"""A rank's side: its numbers, its channel to the test, and the loop that serves the calls of a ``World``.

Messages are pickled by hand, not by ``Connection.send``: torch changes the pickler of that method to move tensors
through shared memory.
"""

import contextlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend import BACKEND
from suite_rules import bound

DEADLINE = 25.0
"""Seconds that a rank and its test wait for each other on an idle machine."""

PATIENT = 120.0
"""Timeout of groups in seconds, far above every bound: what comes sooner was noticed."""


class Rank:
    """One rank, in its own process, with a channel to the test.

    Args:
        scratch: a folder that all ranks share: of the job, or in a ``World`` of the call.
        address: host and port of the test's store.
        prefix: of these ranks' keys there.
    """

    def __init__(
        self,
        channel: connection.Connection,
        rank: int,
        size: int,
        scratch: Path,
        address: tuple[str, int],
        prefix: str,
    ) -> None:
        self.rank, self.size, self.scratch, self.address = rank, size, scratch, address
        self._store = dist.TCPStore(*address, is_master=False)
        self._channel, self._prefix, self._pid = channel, prefix, os.getpid()

    def tell(self, value: Any) -> None:
        """Send a value to the test."""
        self._channel.send_bytes(pickle.dumps((True, value)))

    def hear(self, timeout: float | None = DEADLINE) -> Any:
        """Wait for what the test sends, for ``bound(timeout)`` seconds or, with None, without an end."""
        if not self._channel.poll(timeout and bound(timeout)):
            raise TimeoutError("the test sends nothing")
        return pickle.loads(self._channel.recv_bytes())

    def pause(self) -> Any:
        """Report that this rank is ready, and wait for what the test sends."""
        self.tell("ready")
        return self.hear()

    def fail(self) -> None:
        """Send the exception being handled to the test, but not from a fork of the rank."""
        if os.getpid() == self._pid:
            self._channel.send_bytes(pickle.dumps((False, traceback.format_exc())))

    def store(self, name: str) -> dist.Store:
        """Return a store that these ranks share under that name."""
        return dist.PrefixStore(f"{self._prefix}{name}/", self._store)

    def init(self, name: str = "first", timeout: float = PATIENT, **other: Any) -> None:
        """Make the default group."""
        named = {"rank": self.rank, "world_size": self.size, "store": self.store(name)} | other
        dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout), **named)

    def meet(self, name: str = "meet", size: int = 0) -> None:
        """Wait in the store for all ranks, or ``size`` of them: a group's timeout can be shorter than a start."""
        store, size = self.store(name), size or self.size
        round_ = (store.add("come", 1) - 1) // size + 1
        while store.add("come", 0) < round_ * size:
            time.sleep(0.005)


_this: Rank | None = None


def here() -> Rank:
    """Return this process's rank."""
    assert _this is not None, "here() is for functions that run on ranks"
    return _this


class ThisRank:
    """Stands in the arguments of a call for the rank that gets them."""

    def __reduce__(self) -> tuple[Callable[[], Rank], tuple[()]]:
        return here, ()


def run(channel: connection.Connection, call: bytes, kind: type[Rank], *place: Any) -> None:
    """Be a rank: run a function with the rank and its arguments, and send the test what it returns or raises."""
    global _this
    torch.set_num_threads(1)
    _this = kind(channel, *place)
    try:
        function, arguments = pickle.loads(call)
        _this.tell(function(_this, *arguments))
    except BaseException:
        _this.fail()
        raise
    finally:
        _this = None  # the end of the interpreter destroys no store


@dataclass(frozen=True)
class Call:
    """A function that all ranks of a ``World`` are to run.

    ``group`` is new for every process group; None means a call without a group.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    group: str | None
    keep_group: bool
    scratch: Path


def serve(rank: Rank, prepare: Callable[[], None] | None) -> None:
    """Answer calls, each pickled by itself, until None arrives."""
    if prepare is not None:
        prepare()
    current: str | None = None
    while (message := rank.hear(None)) is not None:
        environment = dict(os.environ)
        try:
            call: Call = pickle.loads(message)
            if call.group == current:
                # Not at the end of the last call: Gloo's groups break if a rank leaves while another still connects.
                _destroy_subgroups()
            else:
                _destroy()
                if call.group is not None:
                    # Below the deadline of a call, so that a hang shows the backend's error.
                    rank.init(call.group, timeout=bound(0.6 * DEADLINE))
                current = call.group
            environment = dict(os.environ)  # making a group sets variables for torch's DDP
            rank.scratch = call.scratch
            torch.manual_seed(0)
            value = call.function(*call.arguments)
            if call.keep_group:
                assert dist.is_initialized(), "destroys the group: say fresh=True or init=False"
            else:
                _destroy()
                current = None
            sys.stdout.flush()
            sys.stderr.flush()
            rank.tell(value)
        except BaseException:
            rank.fail()
            if os.getpid() != rank._pid:
                raise
        finally:
            os.environ.clear()
            os.environ.update(environment)
    _destroy()


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _destroy_subgroups() -> None:
    """Destroy the groups beside the default one that a call left behind."""
    known = dist.distributed_c10d._world.pg_map
    for group in [group for group in known if group is not dist.group.WORLD]:
        with contextlib.suppress(ValueError):  # destroyed together with another one
            dist.destroy_process_group(group)
