"""``python -m fastcoll.bench.hosts``: collectives between hosts, fastcoll and gloo in turns, and the bytes that leave.

Hosts are network namespaces of this machine with shaped links (root only). Both backends run in the same processes,
call by call in turns; a time is that of the slowest rank, a number of bytes that of the busiest host, and of both the
median. Beside them stands what no algorithm can do without: the bytes that a host must send, and the link's own time
for them. Behind ``--`` stand arguments of ``python -m fastcoll.bench``, which then runs on these hosts instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._launch import ALLOCATOR
from fastcoll.bench import namespaces
from fastcoll.bench.machine import PRETENDED_HOSTS, describe_machine, describe_run
from fastcoll.bench.record import write_record
from fastcoll.bench.wire import bytes_sent, least_bytes

__all__ = ["main"]

BACKENDS = ("fastcoll", "gloo")
CALLS = (
    *("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("reduce", "all_to_all", "gather", "scatter", "send", "exchange"),
)
_MODULE = "fastcoll.bench.hosts"
_PORT = 29531
_QUIET = 0.002  # seconds between calls


def _prepared(call: str, message: int) -> Callable[[Any], object]:
    """Returns what runs the call on a group, on tensors of its own."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(max(ranks, message // 4) // ranks * ranks)
    part, other = torch.ones(whole.numel() // ranks), torch.empty_like(whole)
    parts = list(other.chunk(ranks)) if rank == 0 else None
    ends = (0, ranks - 1)

    def send(group: Any) -> None:
        if rank in ends:
            turns = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]
            for turn in turns:
                turn(whole, ends[1 - ends.index(rank)], group)

    def exchange(group: Any) -> None:
        if rank in ends:
            peer = ends[1 - ends.index(rank)]
            pair = [
                dist.P2POp(dist.isend, whole, peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

    calls: dict[str, Callable[[Any], object]] = {
        "send": send,
        "exchange": exchange,
        "barrier": lambda group: dist.barrier(group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "reduce": lambda group: dist.reduce(whole, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "gather": lambda group: dist.gather(part, parts, 0, group=group),
        "scatter": lambda group: dist.scatter(part, parts, 0, group=group),
    }
    return calls[call]


def _measured(call: str, message: int, groups: dict[str, Any], rounds: int) -> dict[str, Any]:
    run = _prepared(call, message)
    told: dict[str, list[tuple[float, int]]] = {name: [] for name in groups}
    for _ in range(rounds + 1):  # the first warms up
        for name, group in groups.items():
            idle = bytes_sent()
            dist.barrier(group=groups["gloo"])
            time.sleep(_QUIET)
            before, begin = bytes_sent(), time.perf_counter()
            run(group)
            seconds = time.perf_counter() - begin
            dist.barrier(group=groups["gloo"])  # all bytes have left
            time.sleep(_QUIET)
            sent = bytes_sent() - before - (before - idle)  # less the barrier's own
            told[name].append((seconds, sent))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, told, group=groups["gloo"])
    case: dict[str, Any] = {"call": call, "bytes": message}
    for name in groups:
        turns = list(zip(*(ranks[name][1:] for ranks in everybody), strict=True))
        case[name] = {
            "ms": statistics.median(max(s for s, _ in turn) for turn in turns) * 1e3,
            "sent": statistics.median(max(b for _, b in turn) for turn in turns),
        }
    return case


def _run_rank(options: argparse.Namespace) -> int:
    """Is one rank; the first writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("fastcoll", timeout=timedelta(minutes=5))
    groups = {"fastcoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    cases = []
    for call in options.call or CALLS:
        for message in [0] if call == "barrier" else options.bytes:
            rounds = options.rounds if message <= 1 << 20 else max(3, options.rounds // 4)
            case = _measured(call, message, groups, rounds)
            if dist.get_rank() == 0:
                cases.append(case)
                print(_line(case, options), flush=True)
    transport = groups["fastcoll"]._get_backend(torch.device("cpu")).transport()
    if dist.get_rank() == 0:
        Path(options.rank_result).write_text(json.dumps({"transport": transport, "cases": cases}))
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group()
    return 0


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


def _head() -> str:
    return (
        f"{'call':<15}{'bytes':>10}{'fastcoll ms':>12}{'gloo ms':>11}{'ratio':>8}"
        f"{'sent/least':>12}{'gloo':>8}{'time/link':>10}"
    )


def _run_ranks(options: argparse.Namespace, command: list[str]) -> None:
    """Runs a command once per rank, on the pretended hosts.

    Raises:
        SystemExit: One of them failed.
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
                PRETENDED_HOSTS: f"--hosts {options.hosts} --per-host {options.per_host} "
                f"--megabits {options.megabits:g}",
            }
            ranks.append(cluster.spawn(rank // options.per_host, command, variables))
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{_MODULE}: ranks ended with {codes}")


def _run_hosts(options: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "cases.json")
        command = [sys.executable, "-m", _MODULE, *given, "--rank-result", str(result)]
        _run_ranks(options, command)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--per-host", type=int, default=2, help="ranks of each (%(default)s)")
    parser.add_argument(
        "--megabits", type=float, default=1000, help="of a link; 0: unshaped (%(default)s)"
    )
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[4, 1 << 16, 1 << 20, 1 << 24], help="of messages"
    )
    parser.add_argument("--call", nargs="+", choices=CALLS, help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="of a call (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the record")
    parser.add_argument("bench", nargs="*", help="arguments of python -m fastcoll.bench, behind --")
    parser.add_argument("--rank-result", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.rank_result:
        return _run_rank(options)
    if options.hosts < 2 or options.per_host < 1 or options.rounds < 1:
        parser.error("expected 2 hosts or more, and a rank and a round at least")
    if problem := namespaces.missing():
        parser.error(problem)
    if options.bench:
        _run_ranks(options, [sys.executable, "-m", "fastcoll.bench", *options.bench])
        return 0
    print(_head())
    found = _run_hosts(options, given)
    record = {
        **describe_run(given, _MODULE),
        "machine": describe_machine(torch.device("cpu")),
        "hosts": options.hosts,
        "ranks_per_host": options.per_host,
        "megabits": options.megabits,
        "unit": "ms: median of the slowest rank's times; sent: median of the busiest host's bytes",
        **found,
    }
    if options.json:
        write_record(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
