"""Measures collectives over sizes: verifies, times all backends and the floor in turns, verifies again."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

from fastcoll._measure import Call, Timing, synchronize, take_turn
from fastcoll.bench import report
from fastcoll.bench.collectives import COLLECTIVES, Case, build_case
from fastcoll.bench.floor import bind_floor
from fastcoll.bench.options import DTYPES, sizes
from fastcoll.bench.oracle import verify
from fastcoll.bench.peer import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.run import Run

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


def _try(run: Run, case: Case, peer: Peer) -> tuple[Case, Call, int]:
    """Makes the first calls, also verified ones if requested; raises if the backend cannot do the case.

    Returns:
        The case, perhaps on buffers of the backend; the call; the number of wrong elements.
    """
    case = peer.place(case)
    call = peer.bind(case)
    call()
    synchronize(run.device)
    wrong = verify(case, call, run.options.seed, run.options.check) if peer.delivers else 0
    case.clear()
    return case, call, wrong


def _measure_case(run: Run, case: Case, advance: Call) -> dict[str, Any]:
    tried: dict[str, tuple[Case, Call, int]] = {}
    unsupported: dict[str, str] = {}
    for peer in run.peers:
        found, problem = run.attempt(partial(_try, run, case, peer))
        if problem or found is None:
            unsupported[peer.name] = problem
        else:
            tried[peer.name] = found
    wrong = {name: first for name, (_, _, first) in tried.items()}
    turns = {name: partial(take_turn, call, run.device) for name, (_, call, _) in tried.items()}
    if floor := bind_floor(case):
        turns[FLOOR] = partial(take_turn, floor, run.device)
    case.clear()  # zeros: repeated sums in place leave them as they are
    timings: dict[str, Timing] = {}
    disturbed: dict[str, Any] = {"other_processes_percent": None, "attempts": 0}
    if tried:
        timings, disturbed = run.measure(turns, case.collective.rooted, advance)
    delivering = [peer.name for peer in run.peers if peer.delivers and peer.name in tried]
    for name in delivering:
        again = run.options.seed + run.options.check
        more, problem = run.attempt(partial(verify, *tried[name][:2], again, run.options.check))
        if problem:
            unsupported[name] = problem
        wrong[name] += more or 0
    done = [name for name in tried if name not in unsupported]
    wrong_by_rank = run.control.all_gather(wrong)
    row: dict[str, Any] = {
        "collective": case.collective.name,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        "op": case.op,
        "root": case.root if case.collective.rooted else None,
        "size": case.size,
        "count": case.count,
        **disturbed,
        "across_ranks": "slowest" if case.collective.rooted else "median",
        "floor": asdict(timings[FLOOR]) if FLOOR in timings else None,
        "backends": {name: asdict(timings[name]) for name in done},
        "unsupported": unsupported,
    }
    checked = run.options.check > 0
    for name, backend in row["backends"].items():
        total = sum(rank[name] for rank in wrong_by_rank)
        backend["wrong"] = total if checked and name in delivering else None
    return row


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
        options.wide,
    )
    run.say(*report.heading(run.record, table.legend))
    with progress_bar("fastcoll.bench", turns, run.rank == 0) as advance:
        for name, dtype, op in kinds:
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
    return run.finish(*table.averages())
