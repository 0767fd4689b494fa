"""``python -m fastcoll.bench.hosts``: collectives between hosts, fastcoll and gloo in turns, and the bytes sent.

Hosts are network namespaces of this machine with shaped links (root only). Both backends run in the same processes,
and take turns call by call. A time is the median of the slowest rank's times, a number of bytes the median of the
busiest host's. The table compares them with the minimum for any algorithm: the bytes that a host must send, and the
link's time for them. Results are verified before and after. With arguments after ``--``, ``python -m fastcoll.bench``
runs on these hosts instead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._launch import ALLOCATOR, join, rank_variables
from fastcoll._measure import Call, Control, in_turns
from fastcoll.bench import namespaces
from fastcoll.bench.collectives import Case, build_case
from fastcoll.bench.conditions import PRETENDED_HOSTS, command_line, describe_run
from fastcoll.bench.derived import least_bytes
from fastcoll.bench.options import HOST_CALLS, script_parser
from fastcoll.bench.oracle import verify
from fastcoll.bench.peer import bind, exchange, round_trip
from fastcoll.bench.record import write_record
from fastcoll.bench.report import closing
from fastcoll.bench.table import Column, Table

__all__ = ["main", "run_rank"]

_MODULE = "fastcoll.bench.hosts"
_PORT = 29531
_QUIET = 0.002  # seconds between calls
_TABLE = Table(
    Column("call", -14),
    Column("bytes", 10),
    *(Column("fastcoll ms", 11, 3), Column("gloo ms", 10, 3), Column("ratio", 7)),
    *(Column("sent/least", 11), Column("gloo", 7), Column("time/link", 9)),
    Column("#wrong", 7),
)


def _bytes_sent() -> int:
    """Returns the bytes that this host has sent so far, on all interfaces except the loopback."""
    sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            sent += int(counts.split()[8])
    return sent


def _prepared(
    call: str, message: int, control: Control, group: dist.ProcessGroup
) -> tuple[Case, Call]:
    """Returns new tensors, and a function that makes the call on them and a group."""
    rank, ranks = control.rank, control.world_size
    ends = (0, ranks - 1)
    between = call in ("send", "exchange")  # each end gets the other end's data
    size, cpu = max(ranks * 4, message), torch.device("cpu")
    name = "sendrecv" if between else call
    case = build_case(name, size, torch.float32, "sum", rank, ranks, 0, cpu)
    if not between:
        return case, bind(case, group)
    peer = ends[rank == 0]
    here: list[tuple[int | None, int]] = [(peer, 0)] if rank in ends else []
    case = replace(case, collective=replace(case.collective, expected=lambda *_: here))
    if call == "send":
        return case, round_trip(case.send, case.receive, ends, group)
    both = exchange(case.send, peer, case.receive, peer, group)
    return case, both if here else lambda: None


def _measured(
    call: str, message: int, control: Control, groups: dict[str, dist.ProcessGroup], rounds: int
) -> dict[str, Any]:
    meet = partial(dist.barrier, groups["gloo"])

    def take(tensors: Case, run: Call) -> list[tuple[float, int]]:
        tensors.reset()
        idle = _bytes_sent()
        meet()
        time.sleep(_QUIET)
        before, begin = _bytes_sent(), time.perf_counter()
        run()
        seconds = time.perf_counter() - begin
        meet()  # all bytes have left
        time.sleep(_QUIET)
        # Minus the bytes of the barrier.
        return [(seconds, _bytes_sent() - before - (before - idle))]

    works = {name: _prepared(call, message, control, group) for name, group in groups.items()}

    def wrong(seed: int) -> dict[str, int]:
        return {name: verify(*work, seed, 1) for name, work in works.items()}

    before = wrong(1)
    taken = in_turns({name: partial(take, *work) for name, work in works.items()}, rounds + 1)
    everybody, *checks = zip(*control.all_gather([taken, before, wrong(2)]), strict=True)
    case: dict[str, Any] = {"call": call, "bytes": message}
    for name in groups:
        # Without the first turn, which warms up.
        found = list(zip(*(ranks[name][1:] for ranks in everybody), strict=True))
        case[name] = {
            "ms": statistics.median(max(s for s, _ in turn) for turn in found) * 1e3,
            "sent": statistics.median(max(b for _, b in turn) for turn in found),
            "wrong": sum(counts[name] for ranks in checks for counts in ranks),
        }
    return case


def run_rank(arguments: list[str]) -> int:
    """Runs one rank; the first rank prints the table and writes the record.

    Returns:
        The exit status: 0, or 1 if a result was wrong.
    """
    options = script_parser("hosts").parse_args(arguments)
    torch.set_num_threads(1)
    control = join("fastcoll", timedelta(minutes=5))
    assert dist.group.WORLD is not None
    groups = {"fastcoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    first = control.rank == 0
    if first:
        print(*_TABLE.head())
    cases = []
    for call in options.call or HOST_CALLS:
        for message in [0] if call == "barrier" else options.bytes:
            rounds = options.rounds if message <= 1 << 20 else max(3, options.rounds // 4)
            cases.append(_measured(call, message, control, groups, rounds))
            if first:
                print(_TABLE.row(_cells(cases[-1], options)), flush=True)
    wrong = sum(case[name]["wrong"] for case in cases for name in groups)
    if first:
        print("", *closing(wrong, True, len(cases)), sep="\n")
    if first and options.json:
        backend: Any = groups["fastcoll"]._get_backend(torch.device("cpu"))
        record = {
            **describe_run(command_line(_MODULE, arguments)),
            "hosts": options.hosts,
            "ranks_per_host": options.per_host,
            "megabits": options.megabits,
            "unit": "ms: median of the slowest rank's times; sent: median of the busiest host's bytes",
            "transport": backend.transport(),
            "cases": cases,
        }
        write_record(options.json, record)
    control.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


def _cells(case: dict[str, Any], options: argparse.Namespace) -> list[str | float]:
    ours, gloo = case["fastcoll"], case["gloo"]
    more: list[float] = []
    least = least_bytes(case["call"], case["bytes"], options.hosts)
    if least and case["bytes"] >= 1 << 16:
        more = [ours["sent"] / least, gloo["sent"] / least]
        if options.megabits:
            more.append(ours["ms"] / (least * 8e-3 / options.megabits))
    times = [ours["ms"], gloo["ms"], ours["ms"] / gloo["ms"]]
    wrong = ours["wrong"] + gloo["wrong"]
    return [case["call"], case["bytes"], *times, *more, *[""] * (3 - len(more)), wrong]


def _run_ranks(options: argparse.Namespace, command: list[str]) -> None:
    """Runs a command once per rank, on the emulated hosts.

    Raises:
        SystemExit: A rank failed.
    """
    per_host, ranks = options.per_host, options.hosts * options.per_host
    common = {
        **ALLOCATOR,
        "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if options.bench:
        flags = f"--hosts {options.hosts} --per-host {per_host} --megabits {options.megabits:g}"
        common[PRETENDED_HOSTS] = flags
    with namespaces.Cluster(options.hosts, options.megabits) as cluster:
        started = []
        for rank in range(ranks):
            placed = rank_variables(
                rank, ranks, rank % per_host, per_host, cluster.address(0), _PORT
            )
            started.append(cluster.spawn(rank // per_host, command, {**common, **placed}))
        codes = [each.wait() for each in started]
    if any(codes):
        raise SystemExit(f"{_MODULE}: ranks ended with {codes}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank if RANK is set, else starts all ranks; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "RANK" in os.environ:
        return run_rank(given)
    parser = script_parser("hosts")
    options = parser.parse_args(given)
    if options.hosts < 2 or options.per_host < 1 or options.rounds < 1:
        parser.error("expected 2 hosts or more, and a rank and a round at least")
    if problem := namespaces.missing():
        parser.error(problem)
    module, words = ("fastcoll.bench", options.bench) if options.bench else (_MODULE, given)
    _run_ranks(options, [sys.executable, "-m", module, *words])
    return 0


if __name__ == "__main__":
    sys.exit(main())
