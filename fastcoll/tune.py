"""``python -m fastcoll.tune``: measures the tuning table of this host and writes it where it is found.

    python -m fastcoll.tune                  measure with 2 ranks, write the table of this host
    python -m fastcoll.tune --nproc 8 --output tuning.json       use it with FASTCOLL_TUNING=tuning.json
    python -m fastcoll.tune --nproc 8 --device cuda              the table's section on devices (fastcoll.tune_device)
    torchrun --nnodes 2 ... -m fastcoll.tune --hosts             the network between hosts (fastcoll.tune_hosts)

Each value is measured by groups that differ in nothing else, in turns, so that the machine's noise meets all
alike; medians decide. Do it on an idle machine, with the number of ranks of the runs to come.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastcoll import tuning
from fastcoll._load import C
from fastcoll._version import __version__
from fastcoll.bench.control import Control
from fastcoll.bench.launch import launch
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.timing import Plan, measure
from fastcoll.bench.turn import TimedCall

__all__ = ["NEVER", "Experiment", "experiments", "from_where", "main", "threshold", "up_to_where"]

KIB, MIB = 1 << 10, 1 << 20
NEVER = 1 << 62
Times = Mapping[int, Mapping[int, float]]
"""Median microseconds by message size and by the value of the field that was set."""


def _product(factors: Iterable[float]) -> float:
    return math.exp(sum(map(math.log, factors)))


def threshold(times: Times, below: int, above: int) -> int:
    """Returns where to change from one value to the other, so that the product of all times is the least.

    Args:
        times: Of two values.
        below: The value in use for smaller messages.
        above: The value in use from the result on.

    Returns:
        A size, or NEVER if `above` is best used nowhere.
    """
    sizes = sorted(times)

    def cost(first: int) -> float:
        return _product(times[size][above if size >= first else below] for size in sizes)

    return min([*sizes, NEVER], key=cost)


def from_where(times: Times) -> int:
    """Returns the least size to use the value 0 from; NEVER if it is best used nowhere."""
    return threshold(times, NEVER, 0)


def up_to_where(times: Times) -> int:
    """Returns the greatest size to use the value NEVER for; 0 if it is best used nowhere."""
    first = threshold(times, NEVER, 0)
    return max((size for size in times if size < first), default=0)


def _fastest(times: Times) -> int:
    """Returns the value whose product of times over all sizes is the least."""
    values = next(iter(times.values()))
    return min(values, key=lambda value: _product(row[value] for row in times.values()))


@dataclass(frozen=True)
class Experiment:
    """How one field of the table is found.

    Attributes:
        field: Of the table.
        call: What is timed: (message size in bytes, group) -> call without arguments.
        sizes: Message sizes.
        values: Of the field, one group each.
        decide: From the median times to the value of the field.
    """

    field: str
    call: Callable[[int, dist.ProcessGroup], Callable[[], object]]
    sizes: Sequence[int]
    values: Sequence[int]
    decide: Callable[[Times], int]


def _all_reduce(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    return partial(dist.all_reduce, torch.zeros(size // 4), group=group)


def _shared(elements: int, group: dist.ProcessGroup) -> torch.Tensor:
    cpu = torch.device("cpu")
    tensor = group._get_backend(cpu).allocate_tensor(elements, dtype=torch.float32, device=cpu)
    return tensor.zero_()


def _gather() -> Callable[..., object]:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_reduce_shared(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    return partial(dist.all_reduce, _shared(size // 4, group), group=group)


def _all_gather_shared(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    output, part = (_shared(elements, group) for elements in (size // 4, size // 4 // group.size()))
    return partial(_gather(), output[: part.numel() * group.size()], part, group=group)


def _all_gather(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    ranks = group.size()
    output = torch.zeros(size // 4 // ranks * ranks)
    return partial(_gather(), output, torch.zeros(output.numel() // ranks), group=group)


def experiments(ranks: int) -> list[Experiment]:
    """Returns what is measured for a number of ranks, in order: later ones use what earlier ones found."""
    either = (0, NEVER)
    segments = [size * KIB for size in (64, 128, 256, 512)]
    return [
        Experiment("segment_bytes", _all_reduce, [256 * KIB, MIB, 4 * MIB], segments, _fastest),
        Experiment("long_segment_bytes", _all_reduce, [16 * MIB, 64 * MIB], segments, _fastest),
        Experiment(
            "one_shot_bytes",
            _all_reduce,
            [size * KIB for size in (4, 8, 16, 32, 64, 128)],
            either,
            # The field is divided by the ranks and doubled when it is used.
            lambda times: up_to_where(times) * ranks // 2,
        ),
        Experiment(
            "streaming_bytes",
            _all_gather,
            [size * MIB for size in (2, 4, 8, 16, 32, 64)],
            either,
            from_where,
        ),
        Experiment(
            "direct_bytes",
            _all_gather_shared,
            [size * KIB for size in (8, 16, 32, 64, 128, 256, 1024)],
            either,
            # The field is compared with what one rank gives.
            lambda times: max(1, from_where(times) // ranks),
        ),
        Experiment(
            "direct_all_reduce_bytes",
            _all_reduce_shared,
            [size * KIB for size in (8, 16, 32, 64, 128, 256, 1024, 4096)],
            either,
            from_where,
        ),
    ]


def _copy(table: C.Tuning, **changed: int) -> C.Tuning:
    copy = C.Tuning()
    for name in tuning.FIELDS:
        setattr(copy, name, changed.get(name, getattr(table, name)))
    return copy


@contextlib.contextmanager
def _group(table: C.Tuning) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="fastcoll", pg_options=C.Options(tuning=table))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _run(
    experiment: Experiment,
    table: C.Tuning,
    control: Control,
    plan: Plan,
    advance: Callable[[], None],
) -> dict[int, dict[int, float]]:
    cpu = torch.device("cpu")
    times: dict[int, dict[int, float]] = {}
    with contextlib.ExitStack() as stack:
        groups = {
            value: stack.enter_context(_group(_copy(table, **{experiment.field: value})))
            for value in experiment.values
        }
        for size in experiment.sizes:
            calls = {
                str(value): TimedCall(experiment.call(size, group), cpu)
                for value, group in groups.items()
            }
            timings = measure(calls, control, plan, False, advance)
            times[size] = {value: timings[str(value)].calls.median for value in groups}
    return times


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.tune", description="Measures the tuning table of this host."
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks to measure with (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns of each candidate (%(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what to measure on (%(default)s)"
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="measure the network between the hosts of ranks that torchrun has started",
    )
    parser.add_argument(
        "--output", type=Path, default=None, help=f"file to write ({tuning.host_path()})"
    )
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
            "Start it by torchrun on each host (docs/hosts.md)"
        )
    if options.rounds < 1:
        parser.error("--rounds: expected at least 1")
    return options


def _kept(path: Path) -> dict[str, Any]:
    """Returns what a file holds that was written on this machine: each part of the table is measured by itself."""
    try:
        record = json.loads(path.read_text())
        tuning.parse(json.dumps(record), path)
    except (OSError, ValueError):
        return {}
    return dict(record) if record["machine"] == tuning.machine_name() else {}


def _shipped() -> dict[str, int]:
    return dict(json.loads(tuning.SHIPPED.read_text())["table"])


def _write(path: Path, record: dict[str, Any]) -> None:
    """Puts a whole table in its place: a rank that starts meanwhile reads the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)
    print(f"written: {path}")


def _join() -> Control:
    """Makes the default group; it has the shipped table, for hosts may have different ones so far."""
    store, rank, ranks = next(rendezvous("env://"))
    dist.init_process_group(
        "fastcoll",
        store=PrefixStore("groups", store),
        rank=rank,
        world_size=ranks,
        pg_options=C.Options(tuning=C.Tuning()),
    )
    return Control(PrefixStore("fastcoll.tune", store), rank, ranks)


def _run_hosts_rank(options: argparse.Namespace, plan: Plan) -> None:
    from fastcoll.tune_hosts import leaders_of, measure_link

    control = _join()
    leaders = leaders_of(control)
    with progress_bar("fastcoll.tune", 2 * plan.turns, control.rank == 0) as advance:
        link, section = measure_link(control, plan, leaders[:2], advance)
    path = options.output or tuning.host_path()
    # All ranks of a group must have one table: that of the first host.
    record = control.all_gather(_kept(path))[0] or {"table": _shipped()}
    record["table"]["link_bytes"] = link
    for rank in leaders:  # in turns, for they may share a file
        if rank == control.rank:
            _write(path, {**record, "machine": tuning.machine_name(), "link": section})
        control.barrier()
    dist.destroy_process_group()


def _run_device_rank(options: argparse.Namespace, plan: Plan) -> None:
    from fastcoll.tune_device import COUNTS, LIST_SIZES, SIZES, measure_device

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    control = _join()
    turns = plan.turns * (4 * len(SIZES) + 2 * len(COUNTS) + 2 * len(LIST_SIZES))
    with progress_bar("fastcoll.tune", turns, control.rank == 0) as advance:
        section = measure_device(control, plan, device, advance=advance)
    if control.rank == 0:
        for name, value in section["table"].items():
            print(f"{name:20} {value:>20}", flush=True)
        path = options.output or tuning.host_path()
        basis = {"machine": tuning.machine_name(), "table": _shipped()}
        _write(path, {**basis, **_kept(path), "device": section})
    control.barrier()
    dist.destroy_process_group()


def _run_rank(options: argparse.Namespace, plan: Plan) -> None:
    torch.set_num_threads(1)
    control = _join()
    rank, ranks = control.rank, control.world_size
    table = tuning.parse(tuning.SHIPPED.read_text(), tuning.SHIPPED).table
    todo = experiments(ranks)
    turns = plan.turns * sum(len(item.sizes) * len(item.values) for item in todo)
    measured: dict[str, Any] = {}
    with progress_bar("fastcoll.tune", turns, rank == 0) as advance:
        for item in todo:
            times = _run(item, table, control, plan, advance)
            value = item.decide(times)
            if rank == 0:
                print(
                    f"{item.field:20} {value:>20}  (shipped: {getattr(table, item.field)})",
                    flush=True,
                )
            setattr(table, item.field, value)
            measured[item.field] = times
    if rank == 0:
        record: dict[str, Any] = {
            "machine": tuning.machine_name(),
            "table": {name: getattr(table, name) for name in tuning.FIELDS},
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "ranks": ranks,
            "versions": {"fastcoll": __version__, "torch": str(torch.__version__)},
            "unit": "median microseconds by message bytes and by the value of the field",
            "measured": measured,
        }
        path = options.output or tuning.host_path()
        kept = _kept(path)
        record |= {name: kept[name] for name in ("device", "link") if name in kept}
        if kept:
            record["table"]["link_bytes"] = kept["table"]["link_bytes"]
        _write(path, record)
    control.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Is one rank where RANK is set, and else starts ``--nproc`` of them; returns the exit status."""
    options = _options(arguments)
    if "RANK" in os.environ:
        plan = Plan(options.rounds * 10, options.rounds, 2, 2.0)
        run = _run_rank if options.device == "cpu" else _run_device_rank
        (_run_hosts_rank if options.hosts else run)(options, plan)
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    return launch([sys.executable, "-m", "fastcoll.tune", *given], options.nproc)


if __name__ == "__main__":
    sys.exit(main())
