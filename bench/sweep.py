"""Measures collectives over sizes: verifies, times all backends and the floor in turns, verifies again.

The floor is the least memory traffic of any backend. All ranks do their parts at the same time, on the buffers of the
collective, without sending or waiting. The rest of a backend's time is its communication:

    all_reduce                             reads and writes its buffer once, in place
    all_gather, all_to_all, sendrecv       writes its result, reading as many bytes
    reduce_scatter                         reads all its chunks, writes one
    broadcast, scatter                     all but the root write their result, reading as many bytes
    reduce, gather                         the root reads as much as all ranks send, and writes its result

Memory of this rank, of the same size, replaces the chunks of other ranks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastcoll._measure import Call, synchronize, take_turn
from fastcoll.bench import report
from fastcoll.bench.collectives import COLLECTIVES, Case, build_case
from fastcoll.bench.options import DTYPES
from fastcoll.bench.oracle import verify
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import Candidate, Run
from fastcoll.bench.sizes import sizes

__all__ = ["FLOOR", "bind_floor", "sweep"]

FLOOR = "(floor)"


def _kinds(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Returns (collective, dtype, op) in the order of measurement."""
    return [
        (name, dtype, op)
        for name in options.names
        for dtype in (options.dtypes if name != "barrier" else options.dtypes[:1])
        for op in (options.ops if COLLECTIVES[name].reduces else ("none",))
    ]


def _alike(case: Case, least: int) -> list[Case]:
    """Returns the case, and so many on new buffers that all buffers together have at least these bytes."""
    own = case.receive is case.send
    whole = case.send.nbytes + (0 if own else case.receive.nbytes)
    cases = [case]
    for _ in range(1, -(-least // whole) if whole else 1):
        send = torch.empty_like(case.send)
        receive = send if own else torch.empty_like(case.receive)
        cases.append(replace(case, send=send, receive=receive))
    return cases


def _in_rotation(calls: Sequence[Call], cases: Sequence[Case]) -> tuple[Call, Call]:
    """Returns a call that makes the next of some calls, and one that writes their data and begins again.

    So the first calls after that use buffers that caches have already lost.
    """
    rotation = [itertools.cycle(calls)]

    def refresh() -> None:
        for case in cases:
            case.reset()
        rotation[0] = itertools.cycle(calls)

    return (calls[0] if len(calls) == 1 else lambda: next(rotation[0])()), refresh


def _bound(run: Run, cases: Sequence[Case], peer: Peer) -> Candidate:
    """Returns a call of a backend, after the first one; raises if the backend cannot do the case."""
    cases = [peer.place(case) for case in cases]
    calls = [peer.bind(case) for case in cases]
    times = run.options.check
    seeds = itertools.count(run.options.seed, max(1, times))

    def check() -> int:
        seed = next(seeds)
        return sum(map(verify, cases, calls, itertools.repeat(seed), itertools.repeat(times)))

    for case, call in zip(cases, calls, strict=True):
        case.reset()
        call()
    synchronize(run.device)
    verified = peer.delivers and times > 0
    if run.options.read:
        calls = list(map(partial(partial, _call_and_read), calls, cases))
    timed, refresh = _in_rotation(calls, cases)
    lifetime = cases[0].lifetime
    data: dict[str, Any] = {"refresh": refresh, "lifetime": lifetime and lifetime * len(cases)}
    turn = partial(take_turn, timed, run.device, **data)
    return Candidate(turn, check if verified else None)


def _call_and_read(call: Call, case: Case) -> None:
    call()
    case.receive.sum()


def _words(tensor: Tensor) -> Tensor:
    """Returns a view as the widest integers that fit, because torch moves these at memory speed."""
    return tensor.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)


def _nothing() -> None:
    pass


def _sum_into(receive: Tensor, parts: list[Tensor]) -> None:
    torch.add(parts[0], parts[-1], out=receive)
    for part in parts[1:-1]:
        receive.add_(part)


def bind_floor(case: Case) -> Call | None:
    """Returns the call with this rank's least memory traffic of a case; None for a barrier, which moves no bytes."""
    name, ranks, is_root = case.collective.name, case.world_size, case.rank == case.root
    if name == "barrier":
        return None
    receive = _words(case.receive)
    if name == "all_reduce":
        return partial(receive.add_, 0)
    if name == "reduce_scatter":
        parts = [_words(chunk) for chunk in case.send.chunk(ranks)]
        return partial(_sum_into, receive, parts)
    if name == "reduce":
        if not is_root:
            return _nothing
        return partial(
            _sum_into, receive, [receive, *(torch.ones_like(receive) for _ in range(ranks - 1))]
        )
    takes_part = {"broadcast": not is_root, "scatter": not is_root, "gather": is_root}
    if not takes_part.get(name, True):
        return _nothing
    return partial(receive.copy_, torch.ones_like(receive))


def _measure_case(run: Run, case: Case, advance: Call) -> dict[str, Any]:
    cases = _alike(case, run.cold_bytes)
    makers = {peer.name: partial(_bound, run, cases, peer) for peer in run.peers}
    floors = [] if run.options.read else [floor for one in cases if (floor := bind_floor(one))]
    beside = {}
    if floors:
        floor, refresh = _in_rotation(floors, cases)
        beside[FLOOR] = partial(take_turn, floor, run.device, refresh=refresh)
    rooted = case.collective.rooted
    found, unsupported, disturbed = run.compare(makers, beside, rooted, advance)
    return {
        "collective": case.collective.name,
        "dtype": next(name for name in DTYPES if getattr(torch, name) == case.dtype),
        "op": case.op,
        "root": case.root if rooted else None,
        "size": case.size,
        "count": case.count,
        "buffers": len(cases),
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
    with run.progress(turns) as advance:
        for name, dtype, op in kinds if run.peers else []:
            if name != above:
                run.say("", *table.head(name))
            above = name
            seen: set[int] = set()
            for size in all_sizes if name != "barrier" else all_sizes[:1]:
                ranks = (run.rank, run.world_size, options.root)
                case = build_case(name, size, getattr(torch, dtype), op, *ranks, run.device)
                if case.size in seen:
                    continue
                seen.add(case.size)
                row = _measure_case(run, case, advance)
                run.add(row, row["backends"].values(), table.rows(row))
    return run.finish(*table.averages(), *table.answers())
