"""One rank of a run: connects to the others and to the backends, and hands over to what is measured."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastcoll import info
from fastcoll._measure import SETTLE_SECONDS, Control, Plan
from fastcoll.bench.gpus import describe_gpus
from fastcoll.bench.machine import describe_machine, describe_run
from fastcoll.bench.peer import Peer
from fastcoll.bench.peers import ADAPTERS, close_peers, open_peers, problem_of
from fastcoll.bench.record import write_record
from fastcoll.bench.wire import count_hosts

__all__ = ["Run", "open_run"]

_Result = TypeVar("_Result")


@dataclass
class Run:
    """What a measurement needs of this rank.

    Attributes:
        left_out: Backends that could not be loaded, and why.
        hosts: On how many hosts the ranks are.
        record: What ``--json`` writes; the measurements add their cases.
    """

    options: argparse.Namespace
    control: Control
    device: torch.device
    peers: list[Peer]
    left_out: dict[str, str]
    hosts: int
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This process among the ranks."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.control.world_size

    @property
    def plan(self) -> Plan:
        """How many calls are timed."""
        return Plan(
            self.options.iters, self.options.rounds, self.options.warmup, self.options.turn_ms
        )

    def attempt(self, act: Callable[[], _Result]) -> tuple[_Result | None, str]:
        """Returns the result, and why some rank has none; all ranks call it."""
        result, problem = None, ""
        try:
            result = act()
        except Exception as error:
            problem = problem_of(error)
        return result, next((text for text in self.control.all_gather(problem) if text), "")

    def say(self, *lines: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def write_json(self) -> None:
        """Writes the record on rank 0, if that was asked for."""
        if self.rank == 0 and self.options.json:
            self.record["load_average_at_end"] = list(os.getloadavg())
            self.record["fastcoll_groups"] = info.groups()
            write_record(Path(self.options.json), self.record)


def _describe(run: Run, arguments: list[str]) -> dict[str, Any]:
    options = run.options
    return {
        **describe_run(arguments),
        "machine": describe_machine(run.device),
        "world_size": run.world_size,
        "hosts": run.hosts,
        "device": run.device.type,
        "seed": options.seed,
        "iterations": run.plan.calls * run.plan.turns,
        "rounds": run.plan.turns,
        "warmup_per_round": options.warmup,
        "turn_milliseconds": options.turn_ms,
        "settle_milliseconds": SETTLE_SECONDS * 1e3,
        "quiet_percent": options.quiet,
        "verified_calls": options.check,
        "unit": "times in microseconds, sizes in bytes",
        "backends": [peer.name for peer in run.peers],
        "libraries": {peer.name: peer.library for peer in run.peers},
        "left_out": run.left_out,
        "cases": [],
    }


@contextlib.contextmanager
def open_run(
    options: argparse.Namespace, arguments: list[str], adapters: Mapping[str, type[Peer]] = ADAPTERS
) -> Iterator[Run]:
    """Connects this rank, which torchrun or :func:`fastcoll._launch.launch` has started.

    Args:
        options: Of the run.
        arguments: From which the options were read, for the record.
        adapters: Backends that are not simply torch's, by name.

    Raises:
        SystemExit: Ranks share a GPU; on all ranks, with status 2.
    """
    torch.set_num_threads(1)
    timeout = timedelta(seconds=options.timeout)
    device = torch.device(options.device)
    if device.type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    control = Control(PrefixStore("fastcoll.bench", store), rank, world_size)
    gpus: dict[str, Any] = {}
    if device.type == "cuda":
        try:
            gpus = describe_gpus(control, device)
        except ValueError as error:
            if rank == 0:
                print(f"fastcoll.bench: {error}", file=sys.stderr, flush=True)
            control.barrier()
            raise SystemExit(2) from None
    # torch wants a default group. It stays idle: every backend is measured in a group of its own.
    dist.init_process_group(
        "gloo" if dist.is_gloo_available() else "fastcoll",
        store=PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    peers, left_out = open_peers(options.backends, control, device, timeout, adapters)
    run = Run(options, control, device, peers, left_out, count_hosts(control))
    if rank == 0:
        run.record = _describe(run, arguments)
        run.record["machine"] |= gpus
        for name, reason in left_out.items():
            print(f"fastcoll.bench: {name} is left out: {reason}", file=sys.stderr, flush=True)
    yield run
    # Not after an error: the other ranks may be waiting for this one in any group.
    control.barrier()
    close_peers(peers)
    dist.destroy_process_group()
    gc.collect()
