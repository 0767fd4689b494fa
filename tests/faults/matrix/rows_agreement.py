"""Rows 23 to 31: ranks that call different things, or do not agree who is there."""

import time
from typing import Any

import torch
from fault_rank import Rank, catch
from matrix_row import Outcome, Stage, Verdict, row, worst
from test_many import one_group_unordered, two_groups_crossed
from test_mismatch import ODD, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter
from test_restart import begins, begins_as_duplicate

__all__: list[str] = []

Call = tuple[Any, ...]
SOON = 1.0


def differs(rank: Rank, theirs: Call, odd: Call):
    """All ranks but one call the same."""
    rank.used(timeout=5.0)
    function, *arguments = odd if rank.rank == ODD else theirs
    rank.tell("ready")
    rank.hear()
    rank.tell(catch(function, *arguments))
    return rank.recover([r for r in range(rank.size) if r != rank.rank])


def told_apart(stage: Stage, *cases: tuple[Call, Call, str, str]) -> Outcome:
    """Play calls that differ; each error must show both calls."""
    found = []
    for theirs, odd, one, other in cases:
        job = stage.started(3, differs, theirs, odd)
        start = time.monotonic()
        job.tell_all()
        found.append(stage.errors(job, start, SOON, "mismatch", one, other, aftermath=stage.native))
        if not stage.native:
            job.close()
    return worst(found)


@row(
    23,
    "shapes differ, small and large",
    "error with both calls on all ranks, 1 s",
    "test_mismatch.py::test_mismatch",
)
def shapes(stage: Stage) -> Outcome:
    return told_apart(
        stage,
        ((all_reduce, 10), (all_reduce, 11), r"float32\[10\]", r"float32\[11\]"),
        ((all_reduce, 1 << 20), (all_reduce, 10), r"float32\[1048576\]", r"float32\[10\]"),
    )


@row(
    24,
    "dtypes differ, of the same and of another size",
    "the same",
    "test_mismatch.py::test_mismatch",
)
def dtypes(stage: Stage) -> Outcome:
    single = (all_reduce, 10, torch.float32)
    return told_apart(
        stage,
        (single, (all_reduce, 10, torch.int32), r"float32\[10\]", r"int32\[10\]"),
        (single, (all_reduce, 10, torch.float64), r"float32\[10\]", r"float64\[10\]"),
    )


@row(25, "reduce operations differ", "the same", "test_mismatch.py::test_mismatch")
def operations(stage: Stage) -> Outcome:
    calls = [(all_reduce, 10, torch.float32, op) for op in ("SUM", "MAX")]
    return told_apart(stage, (*calls, "SUM", "MAX"))


@row(26, "roots differ", "the same", "test_mismatch.py::test_mismatch")
def roots(stage: Stage) -> Outcome:
    return told_apart(
        stage,
        ((broadcast, 0), (broadcast, 1), "root 0", "root 1"),
        ((reduce, 0), (reduce, 1), "root 0", "root 1"),
    )


@row(27, "different collectives", "the same", "test_mismatch.py::test_mismatch")
def kinds(stage: Stage) -> Outcome:
    return told_apart(
        stage,
        ((all_reduce, 10), (broadcast, 0), "all_reduce", "broadcast"),
        ((broadcast, 0), (gather, 0), "broadcast", "gather"),
        ((all_reduce, 30), (reduce_scatter, 10), "all_reduce", "reduce_scatter"),
    )


@row(
    28,
    "splits of all_to_all disagree",
    "the same, with the pair's bytes",
    "test_mismatch.py::test_splits_of_all_to_all",
)
def splits(stage: Stage) -> Outcome:
    rows = 1000
    job = stage.started(3, splits_differ, rows)
    start = time.monotonic()
    job.tell_all()
    return stage.errors(
        job, start, SOON, "mismatch", str(4 * rows), str(4 * rows + 4), aftermath=False
    )


def splits_differ(rank: Rank, rows: int):
    rank.used(timeout=5.0)
    send, receive = [rows] * 3, [rows] * 3
    if rank.rank == 0:
        send[1] = rows + 1
    rank.tell("ready")
    rank.hear()
    rank.tell(catch(all_to_all, send, receive))


@row(
    29,
    "two threads on one group, in no order",
    "a mismatch error or right results; no crash",
    "test_many.py::test_two_threads_on_one_group",
)
def unordered_threads(stage: Stage) -> Outcome:
    job = stage.jobs(2, one_group_unordered)
    found = []
    for raised, seconds in job.hear_all(timeout=25.0).values():
        found.append(Outcome(Verdict.AS_WANTED, seconds))
        for kind, text in raised:
            if kind == "AssertionError":
                found.append(Outcome(Verdict.WRONG_RESULT, detail=text))
            elif "mismatch" not in text and "left the group" not in text:
                found.append(Outcome(Verdict.UNNAMED, detail=text))
    return worst(found)


@row(
    30,
    "two threads on two groups, crossed",
    "right results",
    "test_many.py::test_two_threads_on_two_groups",
)
def crossed_threads(stage: Stage) -> Outcome:
    job = stage.jobs(2, two_groups_crossed)
    raised = [text for texts in job.hear_all(timeout=25.0).values() for text in texts]
    return Outcome(Verdict.FAILS if raised else Verdict.AS_WANTED, detail="; ".join(raised))


@row(
    31,
    "at init: a rank missing, one twice, world sizes that differ",
    "within the timeout; names the rank",
    "test_restart.py::test_a_rank_is_missing",
    "test_restart.py::test_a_rank_has_another_world_size",
    "test_restart.py::test_two_processes_with_one_rank",
)
def bad_beginnings(stage: Stage) -> Outcome:
    errors = ["DistBackendError", "DistStoreError", "DistNetworkError"]
    found = []
    job = stage.jobs(3, begins, [3, 3, 3], 1.0, ranks=[0, 2])
    job.hear_all(timeout=12.0)
    job.tell_all()
    for fault, _ in job.hear_all(timeout=12.0).values():
        found.append(stage.judged(fault, None, 1.5, [r"rank\(?s?\)? 1\b"], errors))
    job = stage.jobs(2, begins, [2, 3], 3.0)
    job.hear_all(timeout=12.0)
    job.tell_all()
    for rank, (fault, _) in job.hear_all(timeout=12.0).items():
        found.append(stage.judged(fault, None, 3.5, [rf"rank {1 - rank}\b", "world size"], errors))
    job = stage.jobs(2, begins_as_duplicate, ranks=[0, 1, 1])
    job.hear_all(timeout=12.0)
    job.tell_all()
    told = []
    for fault, value in job.hear_all(timeout=12.0).values():
        if fault is None and value != [3.0] * 3:
            found.append(Outcome(Verdict.WRONG_RESULT, detail=str(value)))
        if fault is not None:
            told.append(fault)
    named = [fault for fault in told if "joined as rank 1 too" in fault.text]
    if not told:
        found.append(Outcome(Verdict.WRONG_RESULT, detail="nobody was told of the second rank 1"))
    elif not named:
        found.append(Outcome(Verdict.UNNAMED, detail=told[0].text))
    job.tell_all()
    return worst(found)
