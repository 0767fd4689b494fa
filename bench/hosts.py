"""``python -m fastcoll.bench.hosts``: collectives between hosts, fastcoll and gloo in turns, and the bytes sent.

Hosts are network namespaces of this machine with shaped links (root only). Both backends run in the same processes,
and take turns call by call. A time is the median of the slowest rank's times, a number of bytes the median of the
busiest host's. The table compares them with the minimum for any algorithm: the bytes that a host must send, and the
link's time for them. With arguments after ``--``, ``python -m fastcoll.bench`` runs on these hosts instead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._launch import ALLOCATOR
from fastcoll._measure import Call, in_turns
from fastcoll.bench import namespaces
from fastcoll.bench.collectives import build_case
from fastcoll.bench.machine import PRETENDED_HOSTS, describe_machine, describe_run
from fastcoll.bench.peer import bind, exchange
from fastcoll.bench.record import write_record

__all__ = ["least_bytes", "main"]

CALLS = (
    *("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("reduce", "all_to_all", "gather", "scatter", "send", "exchange"),
)
_MODULE = "fastcoll.bench.hosts"
_PORT = 29531
_QUIET = 0.002  # seconds between calls


def least_bytes(call: str, message: int, hosts: int) -> float | None:
    """Returns the least bytes that the busiest host must send; None if they depend on the root.

    Args:
        call: The collective. "send" is from the first rank to the last and back, "exchange" between these two, both
            ways at once.
        message: Its bytes; of reduce_scatter, all_gather and all_to_all the whole buffer.
        hosts: Number of hosts.
    """
    share = (hosts - 1) / hosts
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "exchange": 1.0}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather"), share)
    return factors[call] * message if call in factors else None


def _bytes_sent() -> int:
    """Returns the bytes that this host has sent so far, on all interfaces except the loopback."""
    sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            sent += int(counts.split()[8])
    return sent


def _prepared(call: str, message: int, group: Any) -> Call:
    """Returns a function that makes the call on a group, on new tensors."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    name = "all_to_all" if call in ("send", "exchange") else call  # for its two whole buffers
    size, cpu = max(ranks * 4, message), torch.device("cpu")
    case = build_case(name, size, torch.float32, "sum", rank, ranks, 0, cpu)
    case.clear()
    if name == call:
        return bind(case, group)
    ends = (0, ranks - 1)
    if rank not in ends:
        return lambda: None
    peer = ends[1 - ends.index(rank)]
    if call == "exchange":
        return exchange(case.send, peer, case.receive, peer, group)

    def send() -> None:
        for act in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            act(case.send, peer, group)

    return send


def _measured(call: str, message: int, groups: dict[str, Any], rounds: int) -> dict[str, Any]:
    runs = {name: _prepared(call, message, group) for name, group in groups.items()}
    meet = partial(dist.barrier, groups["gloo"])
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in groups}
    for name in in_turns(list(groups), rounds + 1):  # the first warms up
        idle = _bytes_sent()
        meet()
        time.sleep(_QUIET)
        before, begin = _bytes_sent(), time.perf_counter()
        runs[name]()
        seconds = time.perf_counter() - begin
        meet()  # all bytes have left
        time.sleep(_QUIET)
        # Minus the bytes of the barrier.
        found[name].append((seconds, _bytes_sent() - before - (before - idle)))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found, group=groups["gloo"])
    case: dict[str, Any] = {"call": call, "bytes": message}
    for name in groups:
        turns = list(zip(*(ranks[name][1:] for ranks in everybody), strict=True))
        case[name] = {
            "ms": statistics.median(max(s for s, _ in turn) for turn in turns) * 1e3,
            "sent": statistics.median(max(b for _, b in turn) for turn in turns),
        }
    return case


def _run_rank(options: argparse.Namespace, given: list[str]) -> None:
    """Runs one rank; the first rank prints the table and writes the record."""
    torch.set_num_threads(1)
    dist.init_process_group("fastcoll", timeout=timedelta(minutes=5))
    groups: dict[str, Any] = {"fastcoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    first = dist.get_rank() == 0
    if first:
        print(
            f"{'call':<15}{'bytes':>10}{'fastcoll ms':>12}{'gloo ms':>11}{'ratio':>8}"
            f"{'sent/least':>12}{'gloo':>8}{'time/link':>10}"
        )
    cases = []
    for call in options.call or CALLS:
        for message in [0] if call == "barrier" else options.bytes:
            rounds = options.rounds if message <= 1 << 20 else max(3, options.rounds // 4)
            cases.append(_measured(call, message, groups, rounds))
            if first:
                print(_line(cases[-1], options), flush=True)
    if first and options.json:
        record = {
            **describe_run(given, _MODULE),
            "machine": describe_machine(torch.device("cpu")),
            "hosts": options.hosts,
            "ranks_per_host": options.per_host,
            "megabits": options.megabits,
            "unit": "ms: median of the slowest rank's times; sent: median of the busiest host's bytes",
            "transport": groups["fastcoll"]._get_backend(torch.device("cpu")).transport(),
            "cases": cases,
        }
        write_record(options.json, record)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def _line(case: dict[str, Any], options: argparse.Namespace) -> str:
    ours, gloo = case["fastcoll"], case["gloo"]
    times = (ours["ms"], gloo["ms"], ours["ms"] / gloo["ms"])
    text = "{:<15}{:>10}{:>12.3f}{:>11.3f}{:>8.2f}".format(case["call"], case["bytes"], *times)
    least = least_bytes(case["call"], case["bytes"], options.hosts)
    if least and case["bytes"] >= 1 << 16:
        text += f"{ours['sent'] / least:>12.2f}{gloo['sent'] / least:>8.2f}"
        if options.megabits:
            text += f"{ours['ms'] / (least * 8e-3 / options.megabits):>10.2f}"
    return text


def _run_ranks(options: argparse.Namespace, command: list[str]) -> None:
    """Runs a command once per rank, on the emulated hosts.

    Raises:
        SystemExit: A rank failed.
    """
    ranks = []
    with namespaces.Cluster(options.hosts, options.megabits) as cluster:
        for rank in range(options.hosts * options.per_host):
            variables = {
                **ALLOCATOR,
                "MASTER_ADDR": cluster.address(0),
                "MASTER_PORT": str(_PORT),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % options.per_host),
                "WORLD_SIZE": str(options.hosts * options.per_host),
                "LOCAL_WORLD_SIZE": str(options.per_host),
                "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            if options.bench:
                variables[PRETENDED_HOSTS] = (
                    f"--hosts {options.hosts} --per-host {options.per_host} "
                    f"--megabits {options.megabits:g}"
                )
            ranks.append(cluster.spawn(rank // options.per_host, command, variables))
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{_MODULE}: ranks ended with {codes}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank if RANK is set, else starts all ranks; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    add, sizes = parser.add_argument, [4, 1 << 16, 1 << 20, 1 << 24]
    add("--hosts", type=int, default=2, help="(%(default)s)")
    add("--per-host", type=int, default=2, help="ranks of each (%(default)s)")
    add("--megabits", type=float, default=1000, help="of a link; 0: unshaped (%(default)s)")
    add("--bytes", type=int, nargs="+", default=sizes, help="of messages")
    add("--call", nargs="+", choices=CALLS, help="default: all")
    add("--rounds", type=int, default=20, help="of a call (%(default)s)")
    add("--json", type=Path, help="write the record")
    add("bench", nargs="*", help="arguments of python -m fastcoll.bench, behind --")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if "RANK" in os.environ:
        _run_rank(options, given)
        return 0
    if options.hosts < 2 or options.per_host < 1 or options.rounds < 1:
        parser.error("expected 2 hosts or more, and a rank and a round at least")
    if problem := namespaces.missing():
        parser.error(problem)
    module, words = ("fastcoll.bench", options.bench) if options.bench else (_MODULE, given)
    _run_ranks(options, [sys.executable, "-m", module, *words])
    return 0


if __name__ == "__main__":
    sys.exit(main())
