"""One rank of a run: connects to the other ranks and to the backends, for the measurement that follows.

A backend of ``torch.distributed`` needs no code. Any other needs a class with the members of
``fastcoll.bench.peer.Peer``, and an entry in ``ADAPTERS``. If a rank cannot load a backend, all ranks leave it out,
and the reason is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastcoll import info
from fastcoll._checks import used_by_cores
from fastcoll._group_backend import this_host
from fastcoll._launch import join
from fastcoll._measure import SETTLE_SECONDS, Call, Control, Plan, Timing, Turn, measure
from fastcoll.bench import report
from fastcoll.bench.conditions import command_line, describe_run, last_level_cache
from fastcoll.bench.fold import FoldPeer
from fastcoll.bench.mpi import MpiPeer
from fastcoll.bench.options import MOST_ATTEMPTS
from fastcoll.bench.peer import Peer
from fastcoll.bench.record import write_record
from fastcoll.bench.vllm import VllmPeer

__all__ = ["ADAPTERS", "Candidate", "Run", "describe_gpus", "open_run"]

ADAPTERS: Mapping[str, type[Peer]] = {
    "fastcoll-fold": FoldPeer,
    "gloo-fold": FoldPeer,
    "mpi": MpiPeer,
    "nccl-fold": FoldPeer,
    "vllm": VllmPeer,
}
"""Backends that need a class of their own, by the word of the command line."""

_Result = TypeVar("_Result")


def _used() -> tuple[float, float, float]:
    """Returns the CPU seconds of this rank, the busy seconds of all cores, and all seconds of all cores."""
    return time.process_time(), *used_by_cores()


@dataclass
class Candidate:
    """One way to do what a case measures.

    Attributes:
        turn: Takes a turn.
        verify: Verifies some calls, and returns the number of this rank's wrong elements; None: it is not verified.
        wrong: The sum of these numbers.
    """

    turn: Turn
    verify: Callable[[], int] | None
    wrong: int = 0

    def check(self) -> Candidate:
        """Verifies some calls."""
        self.wrong += self.verify() if self.verify else 0
        return self


@dataclass
class Run:
    """The state of this rank that a measurement uses.

    Attributes:
        peers: The backends that all ranks have, in the order of the command line.
        left_out: The reason for each backend that could not be loaded.
        record: The record that ``--json`` writes; the measurements add their cases.
        wrong: Number of wrong elements so far.
        measured: Number of times so far.
    """

    options: argparse.Namespace
    control: Control
    device: torch.device
    peers: list[Peer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    wrong: int = 0
    measured: int = 0

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.control.world_size

    @property
    def plan(self) -> Plan:
        """Number of timed calls."""
        return Plan(
            self.options.iters, self.options.rounds, self.options.warmup, self.options.turn_ms
        )

    @property
    def cold_bytes(self) -> int:
        """Bytes of the buffers that calls take in turn; 0 without ``--cold``."""
        return 2 * (last_level_cache() or 0) if self.options.cold else 0

    def attempt(self, act: Callable[[], _Result]) -> tuple[_Result | None, str]:
        """Returns the result, and the reason if a rank has none, or ""; all ranks call this."""
        result, problem = None, ""
        try:
            result = act()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return result, self.first(problem)

    def first(self, problem: str) -> str:
        """Returns the problem of the first rank that has one, with the rank if the ranks differ; "" if none has."""
        problems = self.control.all_gather(problem)
        for rank, text in enumerate(problems):
            if text:
                same = all(each == text for each in problems)
                return str(text) if same else f"rank {rank}: {text}"
        return ""

    def connect(self, adapters: Mapping[str, type[Peer]]) -> None:
        """Connects the backends."""
        timeout = timedelta(seconds=self.options.timeout)
        for name in self.options.backends:
            adapter, peer = adapters.get(name, Peer), None
            problem = self.first(adapter.missing(name, self.device))
            if not problem:
                peer, problem = self.attempt(partial(adapter, name, timeout))
            if peer and not problem:
                self.peers.append(peer)
            else:
                self.leave_out(name, problem, peer)

    def leave_out(self, name: str, problem: str, peer: Peer | None) -> None:
        """Leaves a backend out of the run."""
        self.left_out[name] = problem
        if peer:
            peer.close()

    def _measure(
        self, turns: Mapping[str, Turn], slowest_rank: bool, advance: Call
    ) -> tuple[dict[str, Timing], dict[str, Any]]:
        """Measures; with ``--quiet``, again while other processes are too busy, independent of the times.

        Returns:
            The times of the last measurement. For the record, the number of measurements, and the share of the
            machine that other processes used meanwhile, in percent; None on several hosts.
        """
        quiet, attempt = self.options.quiet, 0
        while True:
            attempt, percent, before = attempt + 1, None, _used()
            timings = measure(turns, self.control, self.plan, slowest_rank, advance)
            own, busy, total = (after - then for after, then in zip(_used(), before, strict=True))
            ours = sum(self.control.all_gather(own))
            busy, total = self.control.all_gather([busy, total])[0]
            if int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) == self.world_size:
                percent = max(0.0, 100 * (busy - ours) / total) if total > 0 else 0.0
            quiet_enough = quiet is None or percent is None or percent <= quiet
            if quiet_enough or attempt == MOST_ATTEMPTS:
                return timings, {"other_processes_percent": percent, "attempts": attempt}
            time.sleep(1)

    def compare(
        self,
        makers: Mapping[str, Callable[[], Candidate]],
        beside: Mapping[str, Turn],
        slowest_rank: bool,
        advance: Call,
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, Any]]:
        """Makes candidates, verifies them, times them in turns, and verifies them again; all ranks call this.

        Args:
            makers: Make a candidate, by name.
            beside: Other turns to time.
            slowest_rank: As for ``fastcoll._measure.measure``.
            advance: Called after each turn.

        Returns:
            Times and number of wrong elements by name, the reason for each candidate that failed, and the disturbance.
        """
        made: dict[str, Candidate] = {}
        failed: dict[str, str] = {}
        for name, make in makers.items():
            candidate, problem = self.attempt(lambda make=make: make().check())  # type: ignore[misc]
            if candidate is None or problem:
                failed[name] = problem
            else:
                made[name] = candidate
        turns = {**beside, **{name: candidate.turn for name, candidate in made.items()}}
        timings, disturbed = self._measure(turns, slowest_rank, advance)
        failed |= {name: why for name, one in made.items() if (why := self.attempt(one.check)[1])}
        wrong_by_rank = self.control.all_gather({name: one.wrong for name, one in made.items()})
        found = {name: asdict(one) for name, one in timings.items() if name not in failed}
        for name in made.keys() & found.keys():
            wrong = sum(rank[name] for rank in wrong_by_rank)
            found[name]["wrong"] = wrong if made[name].verify else None
        return found, failed, disturbed

    def say(self, *lines: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    @contextlib.contextmanager
    def progress(self, turns: int) -> Iterator[Call]:
        """Yields a call that advances a bar of these turns, on rank 0's terminal if rich is installed; else no bar."""
        if self.rank or not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        # Drawn only at the end of a turn, because a drawing thread would disturb the timed calls.
        with Progress(
            console=Console(stderr=True, soft_wrap=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        ) as bar:
            task = bar.add_task(f"fastcoll.bench {self.options.word}".rstrip(), total=turns)
            yield lambda: bar.update(task, advance=1, refresh=True)

    def add(
        self, row: dict[str, Any], measured: Collection[dict[str, Any]], lines: list[str]
    ) -> None:
        """Adds a row to the record, with what was measured for it, and prints its lines."""
        if self.rank == 0:
            self.record["cases"].append(row)
        self.wrong += sum(each["wrong"] or 0 for each in measured)
        self.measured += len(measured)
        self.write_json()  # now, because a later row may end the process
        self.say(*lines)

    def finish(self, *lines: str, failed: bool = False) -> int:
        """Prints the verdict, and the last lines if no result was wrong; returns the exit status."""
        verdict = report.closing(self.wrong, self.options.check > 0, self.measured)
        self.say("", *verdict, *(() if self.wrong else lines))
        self.write_json()
        return 1 if self.wrong or failed else 0 if self.measured else 2

    def write_json(self) -> None:
        """Writes the record on rank 0 if ``--json`` is given."""
        if self.rank == 0 and self.options.json:
            self.record["load_average_at_end"] = list(os.getloadavg())
            self.record["fastcoll_groups"] = info.groups()
            write_record(Path(self.options.json), self.record)

    def describe(self, arguments: list[str], hosts: int) -> dict[str, Any]:
        """Returns the record of a run on a number of hosts, without cases."""
        options = self.options
        return {
            **describe_run(command_line("fastcoll.bench", arguments), self.device),
            "world_size": self.world_size,
            "hosts": hosts,
            "cores_each": options.cores,
            "device": self.device.type,
            "seed": options.seed,
            "iterations": self.plan.calls * self.plan.turns,
            "rounds": self.plan.turns,
            "warmup_per_round": options.warmup,
            "turn_milliseconds": options.turn_ms,
            "settle_milliseconds": SETTLE_SECONDS * 1e3,
            "quiet_percent": options.quiet,
            "verified_calls": options.check,
            "cold_bytes": self.cold_bytes,
            "unit": "times in microseconds, sizes in bytes",
            "backends": [peer.name for peer in self.peers],
            "libraries": {peer.name: peer.library for peer in self.peers},
            "left_out": self.left_out,
            "cases": [],
        }


def _bind(local_rank: int, cores: int) -> None:
    """Binds this rank, and the threads that it will start, to cores of its own."""
    first = local_rank * cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first : first + cores])


def describe_gpus(control: Control, device: torch.device) -> list[dict[str, Any]]:
    """Gathers all ranks' placements for the record; all ranks call this.

    With different NCCL_HOSTIDs, NCCL treats ranks on one GPU as ranks of several hosts: then results can be verified,
    but times mean nothing. "peers" counts the GPUs whose memory a GPU can access directly.

    Raises:
        ValueError: Ranks share a GPU; raised on all ranks.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(index)
    others = (other for other in range(count) if other != index)
    own = {
        "host": os.environ.get("NCCL_HOSTID") or socket.gethostname(),
        "gpu": properties.name,
        "identity": str(getattr(properties, "uuid", index)),
        "index": index,
        "gpus": count,
        "peers": sum(torch.cuda.can_device_access_peer(index, other) for other in others),
    }
    ranks = control.all_gather(own)
    places = [(rank["host"], rank["identity"]) for rank in ranks]
    for place in dict.fromkeys(places):
        sharing = [str(number) for number, other in enumerate(places) if other == place]
        if len(sharing) > 1:
            raise ValueError(
                f"expected a GPU for each rank, and ranks {', '.join(sharing)} have the same one of {place[0]}, "
                f"which NCCL refuses. Start as many ranks a host as it has GPUs: "
                f"torchrun --nproc-per-node {ranks[int(sharing[0])]['gpus']} -m fastcoll.bench ..."
            )
    return ranks


@contextlib.contextmanager
def open_run(
    options: argparse.Namespace, arguments: list[str], adapters: Mapping[str, type[Peer]] = ADAPTERS
) -> Iterator[Run]:
    """Connects this rank, which torchrun or ``fastcoll._launch.launch`` has started.

    Args:
        options: Options of the run.
        arguments: The command line of the options, for the record.
        adapters: Backends that need a class of their own, by name.

    Raises:
        SystemExit: Ranks share a GPU; raised on all ranks, with status 2.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if options.cores:
        _bind(local_rank, options.cores)
    torch.set_num_threads(options.cores or 1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # torch needs a default group. It stays idle: every backend is measured in a group of its own.
    idle = "gloo" if dist.is_gloo_available() else "fastcoll"
    control = join(idle, timedelta(seconds=options.timeout))
    run = Run(options, control, device)
    gpus: dict[str, Any] = {}
    if device.type == "cuda":
        try:
            gpus = {"ranks": describe_gpus(control, device)}
        except ValueError as error:
            if run.rank == 0:
                print(f"fastcoll.bench: {error}", file=sys.stderr, flush=True)
            control.barrier()
            dist.destroy_process_group()
            raise SystemExit(2) from None
    run.connect(adapters)
    hosts = len(set(control.all_gather(this_host())))
    if run.rank == 0:
        run.record = run.describe(arguments, hosts)
        run.record["machine"] |= gpus
        for name, reason in run.left_out.items():
            print(f"fastcoll.bench: {name} is left out: {reason}", file=sys.stderr, flush=True)
    yield run
    # Not after an error: the other ranks may be waiting for this one in any group.
    control.barrier()
    while run.peers:
        run.peers.pop().close()
    dist.destroy_process_group()
    gc.collect()
