"""``fastcoll tune``: measures the tuning table of this host and writes it where fastcoll reads it.

    fastcoll tune                                      measure with 2 ranks, write the table of this host
    fastcoll tune --nproc 8 --output tuning.json       use it with FASTCOLL_TUNING=tuning.json
    fastcoll tune --nproc 8 --device cuda              the table's device section

On the CPU, groups that differ in one value take turns. On CUDA, the algorithms that can serve a call do, and then
lists of tensors, fused and not. So the machine's noise affects all alike. Medians decide: a limit between two ways is
where the product of all times is least. Run it on an idle machine, with as many ranks as later runs have.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastcoll import tuning
from fastcoll._launch import join, launch
from fastcoll._load import C
from fastcoll._measure import Call, Control, Plan, measure, take_turn
from fastcoll._version import __version__
from fastcoll.bench.collectives import build_case
from fastcoll.bench.peer import bind, in_shared
from fastcoll.cuda.thresholds import DEFAULT, Thresholds, device_name

__all__ = [
    *("NEVER", "Experiment", "experiments", "fastest", "from_where", "limits"),
    *("main", "measure_device"),
]

NEVER = 1 << 62
KIB, MIB = 1 << 10, 1 << 20

Way = TypeVar("Way", int, str)
Times = Mapping[int, Mapping[Way, float]]
"""Median microseconds by message size and by way: the value of a field, or a name."""


# --- times and limits ----------------------------------------------------------------------------


def _median_times(
    sizes: Iterable[int],
    calls: Callable[[int], Mapping[Way, Call]],
    control: Control,
    plan: Plan,
    device: torch.device,
) -> dict[int, dict[Way, float]]:
    """Times the ways of each size in turns; all ranks call it.

    On CUDA a time is that of the slowest rank, else the median of the ranks.
    """
    times = {}
    for size in sizes:
        turns = {way: partial(take_turn, call, device) for way, call in calls(size).items()}
        timings = measure(turns, control, plan, slowest_rank=device.type != "cpu")
        times[size] = {way: timing.time.median for way, timing in timings.items()}
    return times


def _show(control: Control, field: str, value: int, remark: str = "") -> None:
    if control.rank == 0:
        print(f"{field:24} {value:>20}{remark}", flush=True)


def _cost(times: Iterable[float]) -> float:
    return sum(map(math.log, times))


def limits(times: Times[Way], ways: Sequence[Way]) -> list[int]:
    """Returns the largest size of each way but the last, for the least product of all times.

    If several limits are equally good, these are the least. The limit of a way that is used nowhere is 0.

    Args:
        times: Times by size and way; a way may be missing.
        ways: Ways in the order of their sizes, that of the smallest first.
    """
    sizes: list[int] = sorted(times)

    def cost(bounds: Sequence[int]) -> float:
        used = (sum(size > bound for bound in bounds) for size in sizes)
        return _cost(
            times[size].get(ways[way], math.inf) for size, way in zip(sizes, used, strict=True)
        )

    choices = itertools.combinations_with_replacement([0, *sizes], len(ways) - 1)
    best: tuple[int, ...] = min(choices, key=cost)
    # A limit that is not above the one before selects nothing.
    return [bound if bound > before else 0 for before, bound in itertools.pairwise((0, *best))]


def from_where(times: Times[Way], ways: Sequence[Way]) -> int:
    """Returns the least size for which to use the second of two ways; NEVER if there is none."""
    (last,) = limits(times, ways)
    return min((size for size in times if size > last), default=NEVER)


def fastest(times: Times[Way]) -> Way:
    """Returns the way with the least product of times over all sizes."""
    ways = next(iter(times.values()))
    return min(ways, key=lambda way: _cost(row[way] for row in times.values()))


# --- CPU -----------------------------------------------------------------------------------------

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
    # An average in place stays finite however often it is called.
    case = build_case(name, size, torch.float32, "avg", *ranks, 0, torch.device("cpu"))
    if shared:
        case = in_shared(case, group)
    case.reset()
    return bind(case, group)


def _kib(*sizes: int) -> list[int]:
    return [size * KIB for size in sizes]


def experiments(ranks: int) -> list[Experiment]:
    """Returns the experiments for a number of ranks, in order: later ones use the values that earlier ones found.

    A field stands here if its value gained 5 % somewhere. ``segment_bytes`` and ``direct_all_reduce_bytes`` did not.
    """
    segments = _kib(64, 128, 256, 512)
    reduce = partial(_call, "all_reduce", False)
    gather, gather_shared = (partial(_call, "all_gather", shared) for shared in (False, True))

    def first(times: Times[int]) -> int:
        return from_where(times, _WAYS)

    return [
        Experiment("long_segment_bytes", reduce, [16 * MIB, 64 * MIB], segments, fastest),
        # The field is divided by the ranks and doubled when it is used.
        Experiment("one_shot_bytes", reduce, _kib(4, 8, 16, 32, 64, 128), _WAYS,
                   lambda times: limits(times, _WAYS)[0] * ranks // 2),
        Experiment("streaming_bytes", gather, [size * MIB for size in (2, 4, 8, 16, 32, 64)],
                   _WAYS, first),
        # The field is compared with one rank's input.
        Experiment("direct_bytes", gather_shared, _kib(8, 16, 32, 64, 128, 256, 1024), _WAYS,
                   lambda times: max(1, first(times) // ranks)),
    ]  # fmt: skip


def _calls(item: Experiment, groups: Mapping[int, dist.ProcessGroup], size: int) -> dict[int, Call]:
    return {value: item.call(size, group) for value, group in groups.items()}


def _measure_host(control: Control, plan: Plan) -> dict[str, Any]:
    """Returns the table and the measurements behind it."""
    shipped = tuning.values_of(C.Tuning())
    table, measured = dict(shipped), {}
    for item in experiments(control.world_size):
        tables = {value: tuning.as_table(table | {item.field: value}) for value in item.values}
        groups: dict[int, dist.ProcessGroup] = {
            value: dist.new_group(backend="fastcoll", pg_options=C.Options(tuning=one))
            for value, one in tables.items()
        }
        calls = partial(_calls, item, groups)
        times = _median_times(item.sizes, calls, control, plan, torch.device("cpu"))
        for group in groups.values():
            dist.destroy_process_group(group)
        measured[item.field], table[item.field] = times, item.decide(times)
        _show(control, item.field, table[item.field], f"  (shipped: {shipped[item.field]})")
    return {
        "table": {name: table[name] for name in measured},
        "ranks": control.world_size,
        "versions": {"fastcoll": __version__, "torch": str(torch.__version__)},
        "unit": "median microseconds by message bytes and by the value of the field",
        "measured": measured,
    }


# --- CUDA ----------------------------------------------------------------------------------------

SIZES = tuple(4 * KIB << step for step in range(16))  # of messages: 4 KiB to 128 MiB
COUNTS = (2, 4, 8, 16, 64)  # tensors of a list, each as large as the first of LIST_SIZES
LIST_SIZES = tuple(_kib(16, 64, 256, 1024, 4096))  # of each of 16 tensors
_OF_A_LIST = 16
_ORDER = ("one_shot", "two_shot", "ring", "nccl")


def measure_device(
    control: Control,
    plan: Plan,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    counts: Sequence[int] = COUNTS,
    list_sizes: Sequence[int] = LIST_SIZES,
) -> dict[str, Any]:
    """Measures on the default group; all ranks call it.

    Args:
        control: Control of the run.
        plan: Number of calls.
        device: Device of this rank.
        sizes: Message sizes, in bytes.
        counts: Numbers of tensors in a list.
        list_sizes: Sizes of each of 16 tensors, in bytes.

    Returns:
        The device section of the table: device name, number of ranks, the reason if ranks do not map each other's
        memory, the table, and the measurements.
    """
    from fastcoll.cuda import algorithms
    from fastcoll.cuda.engine import engine_of

    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(1, device=device))  # makes communicator and region
    engine = engine_of(group.group_name)
    assert engine is not None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    engine.all_reduces[index].has_kernels()
    topology = engine.all_reduces[index].region.topology
    backend: Any = group._get_backend(device)
    reduce = partial(backend.all_reduce_list, op=dist.ReduceOp.SUM)
    run = partial(_median_times, control=control, plan=plan, device=device)

    def alone(size: int) -> Mapping[str, Call]:
        tensor = torch.zeros(size // 4, device=device)
        what = algorithms.Call(torch.float32, "SUM", (tensor.numel(),))
        able = [n for n in _ORDER if not algorithms.ALGORITHMS[n].refusal(what, topology)]
        return {name: partial(reduce, [tensor], algorithm=name) for name in able}

    def listed(count: int, size: int) -> Mapping[str, Call]:
        tensors = [torch.zeros(size // 4, device=device) for _ in range(count)]
        ways = {"fused": True, "apart": False}
        return {name: partial(reduce, tensors, fuse=fuse) for name, fuse in ways.items()}

    measured = {"sizes": run(sizes, alone), "list_tensors": {}, "list_bytes": {}}
    bounds = [*limits(measured["sizes"], _ORDER), DEFAULT.list_tensors, DEFAULT.list_bytes]
    if topology.kernels:
        by_count = run(counts, lambda count: listed(count, list_sizes[0]))
        by_size = run(list_sizes, lambda size: listed(_OF_A_LIST, size))
        measured |= {"list_tensors": by_count, "list_bytes": by_size}
        bounds[3:] = [
            from_where(by_count, ("apart", "fused")),
            *limits(by_size, ("fused", "apart")),
        ]
    table = asdict(Thresholds(*bounds))
    for name, value in table.items():
        _show(control, name, value)
    return {
        "name": device_name(device),
        "ranks": topology.ranks,
        "without peers": topology.reason,
        "table": table,
        "unit": "median microseconds of the slowest rank",
        "measured": measured,
    }


# --- the command ---------------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fastcoll tune", description="Measures the tuning table of this host."
    )
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="ranks to measure with (%(default)s)")
    add("--rounds", type=int, default=15, help="turns of each candidate (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    add("--output", type=Path, default=tuning.host_path(), help="file to write (%(default)s)")
    options = parser.parse_args(arguments)
    if options.nproc < 2:
        parser.error("--nproc: expected at least 2 ranks")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
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
    """Runs one rank: measures a part of the table, which the first rank writes."""
    torch.set_num_threads(1)
    control = join("fastcoll", options=C.Options(tuning=C.Tuning()))
    plan = Plan(options.rounds * 10, options.rounds, 2, 2.0)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        found: dict[str, Any] = {
            "table": {},
            "device": {"date": date, **measure_device(control, plan, device)},
        }
    else:
        found = {"date": date, **_measure_host(control, plan)}
    if control.rank == 0:
        kept = _kept(options.output) or tuning.SHIPPED
        table = kept["table"] | found["table"]
        _write(options.output, {**kept, **found, "table": table, "machine": tuning.machine_name()})
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
