"""Measures collectives over sizes: verifies, times all backends and the floor in turns, verifies again."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

from fastcoll._measure import Call, synchronize, take_turn
from fastcoll.bench import report
from fastcoll.bench.collectives import COLLECTIVES, Case, build_case
from fastcoll.bench.floor import bind_floor
from fastcoll.bench.options import DTYPES
from fastcoll.bench.oracle import verify
from fastcoll.bench.peer import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.run import Candidate, Run
from fastcoll.bench.sizes import sizes

__all__ = ["FLOOR", "sweep"]

FLOOR = "(floor)"


def _kinds(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Returns (collective, dtype, op) in the order of measurement."""
    return [
        (name, dtype, op)
        for name in options.names
        for dtype in (options.dtypes if name != "barrier" else options.dtypes[:1])
        for op in (options.ops if COLLECTIVES[name].reduces else ("none",))
    ]


def _bound(run: Run, case: Case, peer: Peer) -> Candidate:
    """Returns a call of a backend, after the first one; raises if the backend cannot do the case."""
    case = peer.place(case)
    call = peer.bind(case)
    times = run.options.check
    seeds = itertools.count(run.options.seed, max(1, times))

    def check() -> int:
        try:
            return verify(case, call, next(seeds), times)
        finally:
            case.reset()

    try:
        call()
        synchronize(run.device)
    finally:
        case.reset()
    verified = peer.delivers and times > 0
    timed = partial(_call_and_read, call, case) if run.options.read else call
    return Candidate(partial(take_turn, timed, run.device), check if verified else None)


def _call_and_read(call: Call, case: Case) -> None:
    call()
    case.receive.sum()


def _measure_case(run: Run, case: Case, advance: Call) -> dict[str, Any]:
    case.reset()  # a backend may have its own buffers, and the floor reads these
    makers = {peer.name: partial(_bound, run, case, peer) for peer in run.peers}
    floor = None if run.options.read else bind_floor(case)
    beside = {FLOOR: partial(take_turn, floor, run.device)} if floor else {}
    rooted = case.collective.rooted
    found, unsupported, disturbed = run.compare(makers, beside, rooted, advance)
    return {
        "collective": case.collective.name,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        "op": case.op,
        "root": case.root if rooted else None,
        "size": case.size,
        "count": case.count,
        **disturbed,
        "across_ranks": "slowest" if rooted else "median",
        "floor": found.pop(FLOOR, None),
        "backends": found,
        "unsupported": unsupported,
    }


def sweep(run: Run) -> int:
    """Measures all requested cases, and prints each row when it is measured.

    Returns:
        The exit status: 0, 1 if a result was wrong, 2 if nothing was measured.
    """
    options = run.options
    kinds = _kinds(options)
    all_sizes = list(sizes(options.minbytes, options.maxbytes, options.stepfactor))
    turns = len(kinds) * len(all_sizes) * run.plan.turns * (len(run.peers) + 1)
    above = ""
    table = report.SweepTable(
        run.world_size,
        [peer.name for peer in run.peers if peer.delivers],
        {peer.name: peer.library for peer in run.peers},
        options.baseline,
    )
    run.say(*report.heading(run.record, table.legend))
    with progress_bar("fastcoll.bench", turns, run.rank == 0) as advance:
        for name, dtype, op in kinds if run.peers else []:
            if name != above:
                run.say("", *table.head(name))
            above = name
            seen: set[int] = set()
            for size in all_sizes if name != "barrier" else all_sizes[:1]:
                ranks = (run.rank, run.world_size, options.root)
                case = build_case(name, size, DTYPES[dtype], op, *ranks, run.device)
                if case.size in seen:
                    continue
                seen.add(case.size)
                row = _measure_case(run, case, advance)
                run.add(row, row["backends"].values(), table.rows(row))
    return run.finish(*table.averages(), *table.answers())
