"""``fastcoll tune``: measures the tuning table of this host and writes it where fastcoll reads it.

    fastcoll tune                            measure with 2 ranks, write the table of this host
    fastcoll tune --nproc 8 --output tuning.json                 use it with FASTCOLL_TUNING=tuning.json
    fastcoll tune --nproc 8 --device cuda                        the table's device section (fastcoll.tune_device)
    torchrun --nnodes 2 ... -m fastcoll.tune --hosts             the network between hosts (fastcoll.tune_hosts)

Groups that differ only in one value take turns, so the machine's noise affects all alike. Medians decide. Run it on
an idle machine, with as many ranks as later runs have.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll import tuning
from fastcoll._launch import join, launch
from fastcoll._load import C
from fastcoll._measure import Call, Control, Plan
from fastcoll._version import __version__
from fastcoll.bench.collectives import build_case
from fastcoll.bench.peer import bind, in_shared
from fastcoll.tune_search import NEVER, Times, fastest, from_where, limits, median_times, show

__all__ = ["Experiment", "experiments", "main"]

KIB, MIB = 1 << 10, 1 << 20
_WAYS = (NEVER, 0)  # the extreme values of a field; the first is best for small messages


@dataclass(frozen=True)
class Experiment:
    """How one field of the table is measured.

    Attributes:
        field: Name of the field.
        call: (message size in bytes, group) -> the call to time, without arguments.
        sizes: Message sizes.
        values: Values of the field, one group each.
        decide: Computes the value of the field from the median times.
    """

    field: str
    call: Callable[[int, dist.ProcessGroup], Call]
    sizes: Sequence[int]
    values: Sequence[int]
    decide: Callable[[Times[int]], int]


def _call(name: str, shared: bool, size: int, group: dist.ProcessGroup) -> Call:
    """Returns a call of a collective; `size` is that of its larger buffer."""
    ranks = group.rank(), group.size()
    case = build_case(name, size, torch.float32, "sum", *ranks, 0, torch.device("cpu"))
    if shared:
        case = in_shared(case, group)
    case.reset()
    return bind(case, group)


def _kib(*sizes: int) -> list[int]:
    return [size * KIB for size in sizes]


def experiments(ranks: int) -> list[Experiment]:
    """Returns the experiments for a number of ranks, in order: later ones use the values that earlier ones found."""
    segments = _kib(64, 128, 256, 512)
    reduce, reduce_shared = (partial(_call, "all_reduce", shared) for shared in (False, True))
    gather, gather_shared = (partial(_call, "all_gather", shared) for shared in (False, True))

    def first(times: Times[int]) -> int:
        return from_where(times, _WAYS)

    return [
        Experiment("segment_bytes", reduce, _kib(256, 1024, 4096), segments, fastest),
        Experiment("long_segment_bytes", reduce, [16 * MIB, 64 * MIB], segments, fastest),
        # The field is divided by the ranks and doubled when it is used.
        Experiment("one_shot_bytes", reduce, _kib(4, 8, 16, 32, 64, 128), _WAYS,
                   lambda times: limits(times, _WAYS)[0] * ranks // 2),
        Experiment("streaming_bytes", gather, [size * MIB for size in (2, 4, 8, 16, 32, 64)],
                   _WAYS, first),
        # The field is compared with one rank's input.
        Experiment("direct_bytes", gather_shared, _kib(8, 16, 32, 64, 128, 256, 1024), _WAYS,
                   lambda times: max(1, first(times) // ranks)),
        Experiment("direct_all_reduce_bytes", reduce_shared,
                   _kib(8, 16, 32, 64, 128, 256, 1024, 4096), _WAYS, first),
    ]  # fmt: skip


def _group(table: dict[str, int]) -> dist.ProcessGroup:
    options = C.Options(tuning=tuning.as_table(table))
    group: dist.ProcessGroup = dist.new_group(backend="fastcoll", pg_options=options)
    return group


def _calls(item: Experiment, groups: Mapping[int, dist.ProcessGroup], size: int) -> dict[int, Call]:
    return {value: item.call(size, group) for value, group in groups.items()}


def _measure_host(control: Control, plan: Plan) -> dict[str, Any]:
    """Returns the table and the measurements behind it."""
    shipped = tuning.values_of(C.Tuning())
    table, measured = dict(shipped), {}
    for item in experiments(control.world_size):
        groups = {value: _group(table | {item.field: value}) for value in item.values}
        calls = partial(_calls, item, groups)
        times = median_times(item.sizes, calls, control, plan, torch.device("cpu"))
        for group in groups.values():
            dist.destroy_process_group(group)
        measured[item.field], table[item.field] = times, item.decide(times)
        show(control, item.field, table[item.field], f"  (shipped: {shipped[item.field]})")
    return {
        "table": {name: table[name] for name in measured},
        "ranks": control.world_size,
        "versions": {"fastcoll": __version__, "torch": str(torch.__version__)},
        "unit": "median microseconds by message bytes and by the value of the field",
        "measured": measured,
    }


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fastcoll tune", description="Measures the tuning table of this host."
    )
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="ranks to measure with (%(default)s)")
    add("--rounds", type=int, default=15, help="turns of each candidate (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    add("--hosts", action="store_true",
        help="measure the network between the hosts of ranks that torchrun has started")  # fmt: skip
    add("--output", type=Path, default=tuning.host_path(), help="file to write (%(default)s)")
    options = parser.parse_args(arguments)
    if options.nproc < 2:
        parser.error("--nproc: expected at least 2 ranks")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.hosts and options.device == "cuda":
        parser.error("--hosts: expected --device cpu, which the network between hosts serves")
    if options.hosts and "RANK" not in os.environ:
        parser.error(
            "--hosts: expected ranks on several hosts, got a command without RANK. "
            "Start it by torchrun on each host (docs/guides/several-hosts.md)"
        )
    if options.rounds < 1:
        parser.error("--rounds: expected at least 1")
    return options


def _kept(path: Path) -> dict[str, Any]:
    """Returns the record in a file if this machine wrote it: each part of the table is measured separately."""
    try:
        record = json.loads(path.read_text())
        tuning.parse(json.dumps(record), path)
    except (OSError, ValueError):
        return {}
    return dict(record) if record["machine"] == tuning.machine_name() else {}


def _write(path: Path, record: dict[str, Any]) -> None:
    """Replaces the whole file at once, so a rank that starts meanwhile reads the old table or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)
    print(f"written: {path}")


def _run_rank(options: argparse.Namespace) -> None:
    """Runs one rank: measures a part of the table, which the first rank, or the first of each host, writes."""
    torch.set_num_threads(1)
    # With the shipped table, because hosts may still have different tables.
    control = join("fastcoll", options=C.Options(tuning=C.Tuning()))
    plan = Plan(options.rounds * 10, options.rounds, 2, 2.0)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    writers = [0]
    if options.hosts:
        from fastcoll.tune_hosts import leaders_of, measure_link

        writers = leaders_of(control)
        link, section = measure_link(control, plan, writers[:2])
        found: dict[str, Any] = {"table": {"link_bytes": link}, "link": {"date": date, **section}}
    elif options.device == "cuda":
        from fastcoll.tune_device import measure_device

        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        found = {"table": {}, "device": {"date": date, **measure_device(control, plan, device)}}
    else:
        found = {"date": date, **_measure_host(control, plan)}
    # All ranks of a group must have one table: that of the first host, with the new values.
    kept = control.all_gather(_kept(options.output))[0] or tuning.SHIPPED
    table = kept["table"] | found["table"]
    for rank in writers:  # in turns, because they may share a file
        if rank == control.rank:
            _write(
                options.output, {**kept, **found, "table": table, "machine": tuning.machine_name()}
            )
        control.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank if RANK is set, else starts ``--nproc`` ranks; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    if "RANK" not in os.environ:
        return launch([sys.executable, "-m", "fastcoll.tune", *given], options.nproc)
    _run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
