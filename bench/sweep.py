"""Measures collectives over sizes: verifies, times all backends and the floor in turns, verifies again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from fastcoll.bench import oracle, report
from fastcoll.bench.collectives import COLLECTIVES, Case, algorithm_bandwidth, build_case
from fastcoll.bench.floor import bind_floor
from fastcoll.bench.options import DTYPES, Options, sizes
from fastcoll.bench.peers import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.quiet import Measured, measure_in_quiet
from fastcoll.bench.run import Run
from fastcoll.bench.timing import Call, Timing

__all__ = ["FLOOR", "sweep"]

FLOOR = "(floor)"
_LEGEND = (
    "time: median over calls; q1, q3: quartiles; ratio: times faster than the slowest backend of the size, "
    "by medians and by minima; others: share of the machine that other processes used"
)


def _kinds(options: Options) -> list[tuple[str, str, str]]:
    """Returns (collective, dtype, op) in the order of measurement."""
    return [
        (name, dtype, op)
        for name in options.names
        for dtype in (options.dtypes if name != "barrier" else options.dtypes[:1])
        for op in (options.ops if COLLECTIVES[name].reduces else ("none",))
    ]


def _first_error(run: Run, problem: str) -> str:
    return next((text for text in run.control.all_gather(problem) if text), "")


def _synchronize(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def _verify(run: Run, case: Case, call: Call, first_seed: int) -> int:
    """Makes the verified calls and returns the wrong elements of this rank."""
    wrong = 0
    for seed in range(first_seed, first_seed + run.options.check):
        oracle.fill(case, seed)
        call()
        _synchronize(run)
        wrong += oracle.count_wrong(case, seed)
    return wrong


def _try(run: Run, case: Case, peer: Peer) -> tuple[Call | None, int, str]:
    """Makes the first calls, verified ones if asked for.

    Returns:
        The call to time, how many elements were wrong on this rank, and why the backend cannot do it.
    """
    call, wrong, problem = None, 0, ""
    try:
        call = peer.bind(case)
        call()
        _synchronize(run)
        if peer.delivers:
            wrong = _verify(run, case, call, run.options.seed)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return call, wrong, _first_error(run, problem)


def _statistics(case: Case, timing: Timing) -> dict[str, Any]:
    bandwidth = algorithm_bandwidth(case.size, timing.calls.median)
    factor = case.collective.factor(case.world_size)
    return {
        "time": asdict(timing.calls),
        "rank_medians": timing.rank_medians,
        "algbw": bandwidth,
        "busbw": bandwidth * factor,
    }


def _measure_case(run: Run, case: Case, advance: Callable[[], None]) -> dict[str, Any]:
    calls: dict[str, Call] = {}
    wrong: dict[str, int] = {}
    unsupported: dict[str, str] = {}
    delivering = [peer.name for peer in run.peers if peer.delivers]
    for peer in run.peers:
        call, wrong[peer.name], problem = _try(run, case, peer)
        if problem or call is None:
            unsupported[peer.name] = problem
        else:
            calls[peer.name] = call
    candidates = dict(calls)
    if floor := bind_floor(case):
        candidates[FLOOR] = floor
    measured = Measured({}, None, 0)
    if calls:
        # Zeros, which repeated sums in place leave as they are.
        case.send.zero_()
        case.receive.zero_()
        measured = measure_in_quiet(run, candidates, case.collective.rooted, advance)
    timings = measured.timings
    for name in calls:
        if name in delivering:
            again = run.options.seed + run.options.check
            wrong[name] += _verify(run, case, calls[name], again)
    wrong_by_rank = run.control.all_gather(wrong)
    row: dict[str, Any] = {
        "collective": case.collective.name,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        "op": case.op,
        "root": case.root if case.collective.rooted else None,
        "size": case.size,
        "count": case.count,
        "other_processes_percent": measured.others,
        "attempts": measured.attempts,
        "across_ranks": "slowest" if case.collective.rooted else "median",
        "floor": _statistics(case, timings[FLOOR]) if FLOOR in timings else None,
        "backends": {name: _statistics(case, timings[name]) for name in calls},
        "unsupported": unsupported,
    }
    checked = run.options.check > 0
    for name, backend in row["backends"].items():
        total = sum(rank[name] for rank in wrong_by_rank)
        backend["wrong"] = total if checked and name in delivering else None
    report.add_ratios(row, among=delivering)
    return row


def sweep(run: Run) -> int:
    """Measures all that was asked for and prints the table as it grows.

    Returns:
        The exit status: 0, 1 if a result was wrong, 2 if nothing was measured.
    """
    options = run.options
    kinds = _kinds(options)
    all_sizes = list(sizes(options.min_bytes, options.max_bytes, options.step_factor))
    turns = len(kinds) * len(all_sizes) * run.plan.turns * (len(run.peers) + 1)
    wrong = measured = 0
    above = ""
    run.say(*report.heading(run.record, _LEGEND))
    with progress_bar("fastcoll.bench", turns, run.rank == 0) as advance:
        for name, dtype, op in kinds:
            if name != above:
                run.say("", *report.table_head(name))
            above = name
            seen: set[int] = set()
            for size in all_sizes if name != "barrier" else all_sizes[:1]:
                case = build_case(
                    name,
                    size,
                    DTYPES[dtype],
                    op,
                    run.rank,
                    run.world_size,
                    options.root,
                    run.device,
                )
                if case.size in seen:
                    continue
                seen.add(case.size)
                row = _measure_case(run, case, advance)
                if run.rank == 0:
                    run.record["cases"].append(row)
                run.say(*report.table_rows(row))
                wrong += sum(backend["wrong"] or 0 for backend in row["backends"].values())
                measured += len(row["backends"])
    run.say("", *report.closing(wrong, options.check > 0, measured))
    run.write_json()
    return 1 if wrong else 0 if measured else 2
