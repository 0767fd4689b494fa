"""Measures collectives over sizes: verifies, times all backends and the floor in turns, verifies again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from fastcoll.bench import report
from fastcoll.bench.candidate import Candidate
from fastcoll.bench.collectives import COLLECTIVES, Case, build_case
from fastcoll.bench.floor import bind_floor
from fastcoll.bench.options import DTYPES, Options, sizes
from fastcoll.bench.peer import Peer
from fastcoll.bench.progress import progress_bar
from fastcoll.bench.quiet import Measured, measure_in_quiet
from fastcoll.bench.run import Run
from fastcoll.bench.timing import Timing
from fastcoll.bench.turn import TimedCall
from fastcoll.bench.wire import least_bytes, sent_per_call

__all__ = ["FLOOR", "sweep"]

FLOOR = "(floor)"
_COUNTED = (
    1 << 16
)  # bytes of a message: of smaller ones the frames around them are most of what is sent


def _kinds(options: Options) -> list[tuple[str, str, str]]:
    """Returns (collective, dtype, op) in the order of measurement."""
    return [
        (name, dtype, op)
        for name in options.names
        for dtype in (options.dtypes if name != "barrier" else options.dtypes[:1])
        for op in (options.ops if COLLECTIVES[name].reduces else ("none",))
    ]


def _try(run: Run, case: Case, peer: Peer) -> tuple[Candidate, int]:
    """Makes the first calls, verified ones if asked for; returns also how many elements were wrong."""
    candidate = peer.prepare(case)
    wrong = candidate.verify(run.options.seed, run.options.check) if peer.delivers else 0
    candidate.clear()
    return candidate, wrong


def _statistics(timing: Timing) -> dict[str, Any]:
    return {"time": asdict(timing.calls), "rank_medians": timing.rank_medians}


def _measure_case(run: Run, case: Case, advance: Callable[[], None]) -> dict[str, Any]:
    candidates: dict[str, Candidate] = {}
    wrong: dict[str, int] = {}
    unsupported: dict[str, str] = {}
    delivering = [peer.name for peer in run.peers if peer.delivers]
    for peer in run.peers:
        tried, problem = run.attempt(partial(_try, run, case, peer))
        if problem or tried is None:
            unsupported[peer.name] = problem
        else:
            candidates[peer.name], wrong[peer.name] = tried
    timed: dict[str, TimedCall] = dict(candidates)
    if floor := bind_floor(case):
        timed[FLOOR] = TimedCall(floor, run.device)
    case.clear()  # zeros: repeated sums in place leave them as they are
    measured = Measured({}, None, 0)
    if candidates:
        measured = measure_in_quiet(run, timed, case.collective.rooted, advance)
    timings = measured.timings
    for name in [name for name in delivering if name in timings]:
        again = run.options.seed + run.options.check
        more, problem = run.attempt(partial(candidates[name].verify, again, run.options.check))
        if problem:
            unsupported[name] = problem
        wrong[name] += more or 0
    done = [name for name in candidates if name not in unsupported]
    sent: dict[str, float] = {}
    if run.hosts > 1 and case.size >= _COUNTED:
        for name in done:
            sent[name] = sent_per_call(run.control, candidates[name].call)
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
        "floor": _statistics(timings[FLOOR]) if FLOOR in timings else None,
        "backends": {name: _statistics(timings[name]) for name in done},
        "unsupported": unsupported,
    }
    if sent:
        least = least_bytes(case.collective.name, case.size, run.hosts)
        row["wire"] = {"hosts": run.hosts, "sent": sent, "least": least}
    checked = run.options.check > 0
    for name, backend in row["backends"].items():
        total = sum(rank[name] for rank in wrong_by_rank)
        backend["wrong"] = total if checked and name in delivering else None
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
    table = report.Table(
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
                run.say(*table.rows(row))
                wrong += sum(backend["wrong"] or 0 for backend in row["backends"].values())
                measured += len(row["backends"])
    run.say("", *table.averages(), *report.closing(wrong, options.check > 0, measured))
    run.write_json()
    return 1 if wrong else 0 if measured else 2
