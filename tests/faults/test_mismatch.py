"""Ranks that call different things: at once an error on every rank that names both calls.

Target: as soon as both have called.
"""

import re
import time

import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank, catch
from in_time import assert_raised, cause
from odd_stores import Slow
from on_ranks import on_ranks
from rank_calls import (
    all_gather,
    all_reduce_async,
    all_reduce_with_communicator,
    all_reduce_with_operator,
    all_reduce_with_plan,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

SOON = 1.0
ODD = 1
"""The rank that calls something else."""


def all_reduce(rank, count, dtype="float32", op="SUM"):
    tensor = torch.ones(count, dtype=getattr(torch, dtype))
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))


def fused(rank, wire):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.all_reduce_fused([torch.ones(10)], dist.ReduceOp.SUM, wire)


def premul(rank, factor):
    dist.all_reduce(torch.ones(10), op=dist._make_nccl_premul_sum(factor))


def all_to_all(send, receive):
    dist.all_to_all_single(torch.ones(sum(receive)), torch.ones(sum(send)), receive, send)


def two(call, others, odd, shown):
    """Return a call with the arguments of the others and of the odd rank, whose last ones the text must show."""
    return (call, *others), (call, *odd), shown.format(others[-1]), shown.format(odd[-1])


def kinds(others, odd):
    """Return two calls that the text must tell apart by their names."""
    return others, odd, *(f"{call.__name__}(seq 2" for call, *_ in (others, odd))


def counts(others, odd):
    """Return two ways to reduce, of 10 and of 20 elements."""
    return (others, 10), (odd, 20), "float32[10]", "float32[20]"


SHORT = {
    # name: (what the others call, what the odd rank calls, the two as the text must show them)
    "small shapes": two(all_reduce, [10], [11], "float32[{}], SUM"),
    "large shapes": two(all_reduce, [1_000_000], [1_000_001], "float32[{}], SUM"),
    "small and large": two(all_reduce, [10], [1_000_000], "float32[{}], SUM"),
    "empty and not": two(all_reduce, [0], [5], "float32[{}], SUM"),
    "plans": two(all_reduce_with_plan, [10], [20], "float32[{}], SUM"),
    "sync and async": counts(all_reduce, all_reduce_async),
    "dtypes of one size": two(all_reduce, [10, "float32"], [10, "int32"], "{}[10]"),
    "ops": two(all_reduce, [10, "float32", "SUM"], [10, "float32", "MAX"], "float32[10], {}"),
    "factors": two(premul, [2.0], [3.0], "PREMUL_SUM by {:g}"),
    "wire dtypes": ((fused, None), (fused, torch.bfloat16), "float32[10]", "bfloat16[10]"),
    "roots of broadcast": two(broadcast, [10, 0], [10, 1], "root {}"),
    "sizes of all_gather": two(all_gather, [5], [6], "float32[{}]"),
    "all_reduce and barrier": kinds((all_reduce, 10), (barrier,)),
    "all_reduce and broadcast": kinds((all_reduce, 10), (broadcast, 10, 0)),
    "all_gather and reduce_scatter": kinds((all_gather, 100_000), (reduce_scatter, 100_000)),
}

FULL = {
    "async": two(all_reduce_async, [10], [20], "float32[{}]"),
    "plan and communicator": counts(all_reduce_with_plan, all_reduce_with_communicator),
    "operator and communicator": counts(all_reduce_with_operator, all_reduce_with_communicator),
    "dtypes of two sizes": two(all_reduce, [10, "float32"], [10, "float64"], "{}[10]"),
    "dtypes with equal bytes": (
        *((all_reduce, 10, "float32"), (all_reduce, 20, "bfloat16")),
        *("float32[10]", "bfloat16[20]"),
    ),
    "roots of large broadcast": two(broadcast, [1_000_000, 0], [1_000_000, 1], "root {}"),
    "roots of reduce": two(reduce, [10, 0], [10, 1], "root {}"),
    "roots of gather": two(gather, [4, 0], [4, 1], "root {}"),
    "roots of scatter": two(scatter, [4, 0], [4, 1], "root {}"),
    "roots of large gather": two(gather, [100_000, 0], [100_000, 1], "root {}"),
    "roots of large scatter": two(scatter, [100_000, 0], [100_000, 1], "root {}"),
    "sizes of reduce_scatter": two(reduce_scatter, [5], [6], "float32[{}]"),
    "broadcast and gather": kinds((broadcast, 10, 0), (gather, 4, 0)),
}
"""Those of the full tier alone."""

PLAYED = (
    (plays(23), ["small shapes", "small and large"]),
    (plays(24), ["dtypes of one size", "dtypes of two sizes"]),
    (plays(25), ["ops"]),
    (plays(26), ["roots of broadcast", "roots of reduce"]),
    (plays(27), ["all_reduce and broadcast", "broadcast and gather"]),
)
"""The cases of each fault in the list."""

MARKS = {name: mark for mark, names in PLAYED for name in names}

BETWEEN_HOSTS = {"large shapes", "all_reduce and barrier", *MARKS} - FULL.keys() | {
    "roots of gather"
}
"""Those of the short tier between hosts."""


def cases():
    for name in SHORT | FULL:
        full = [pytest.mark.full] * (name in FULL)
        yield pytest.param(name, "000", marks=[*full, *([MARKS[name]] if name in MARKS else [])])
        short = name in BETWEEN_HOSTS
        yield pytest.param(name, "012", marks=[] if short else pytest.mark.full)


def differ(rank: Rank, others, odd, later: int):
    """Return the error of the call, or of one of so many ``later`` ones."""
    rank.used()
    call = odd if rank.rank == ODD else others
    rank.pause()
    faults = (catch(one[0], rank, *one[1:]) for one in [call, *[(barrier,)] * later])
    return next(filter(None, faults), None), rank.recover()


@pytest.mark.parametrize("case, hosts", list(cases()))
def test_mismatch(jobs, case, hosts):
    others, odd, one, other = (SHORT | FULL)[case]
    # Between hosts a root waits for no other rank.
    later = 2 if hosts != "000" and ("broadcast" in case or "root" in case) else 0
    job = jobs.ready(3, differ, others, odd, later, hosts=hosts)
    start = time.monotonic()
    job.tell_all()
    answers = job.hear_all()
    what_to_do = "same collectives in the same order"
    said = "mismatch between collectives on ranks", what_to_do
    job.after_fault(answers, *said, since=start, within=SOON)
    for fault, _ in answers.values():
        shown = [call in fault.text for call in (one, other)]
        here = all(shown) and re.search(r"seq 2\b", fault.text)
        assert here or (later and any(shown)), fault.text
        assert re.search(rf"\brank {ODD}\b", cause(fault)), fault.text


# --- calls between hosts, in which ranks do not all wait for each other --------------------------


def gathers_after_a_short_one(rank: Rank):
    """What rank 0 says to the other root lies before what tells of the long one."""
    gather(rank, 4)
    return catch(gather, rank, 100_000, 1 if rank.rank == 2 else 0) or catch(dist.barrier)


def scatters(rank: Rank):
    """One rank gives another part than the others expect."""
    parts = [torch.ones(100_001 if rank.rank == 3 else 100_000) for _ in range(rank.size)]
    return catch(dist.scatter, torch.empty_like(parts[0]), parts if rank.rank == 3 else None, 3)


def has_other_roots(rank: Rank):
    """Each host has its own root, which is not its leader: so both leaders give, and the roots wait."""
    return catch(scatter, rank, 100_000, 1 if rank.rank < 2 else 3) or catch(dist.barrier)


def scatters_or_broadcasts(rank: Rank):
    """One host broadcasts from a rank of its own, and waits for nobody; the other scatters."""
    call, root = (broadcast, 3) if rank.rank >= 2 else (scatter, 1)
    return catch(call, rank, 100_000, root) or catch(dist.barrier)


def splits_differ_at_first(rank: Rank):
    """In the group's first long messages, when ranks are not connected yet."""
    sizes = [[50_000 + ((s, r) == (0, 3)) for r in range(4)] for s in range(4)]
    inputs = [torch.ones(size) for size in sizes[rank.rank]]
    return catch(dist.all_to_all, [torch.empty(50_000) for _ in range(4)], inputs)


def uses_long_messages(rank: Rank, calls):
    rank.used()
    fault = calls(rank)
    return fault, rank.recover()


@pytest.mark.parametrize(
    "hosts, calls",
    [
        ("012", gathers_after_a_short_one),
        ("0011", scatters),
        ("0011", has_other_roots),
        ("0011", scatters_or_broadcasts),
        ("0011", splits_differ_at_first),
    ],
)
def test_calls_with_long_messages_that_differ_are_named(jobs, hosts, calls):
    job = jobs(len(hosts), uses_long_messages, calls, hosts=hosts)
    job.after_fault(job.hear_all(), "mismatch between collectives on ranks", within=1.5)


# --- splits and messages -------------------------------------------------------------------------


def splits_differ(rank: Rank, rows):
    rank.used()
    send, receive = [rows] * rank.size, [rows] * rank.size
    if rank.rank == 0:
        send[1] = rows + 1  # rank 1 expects `rows`
    fault = catch(all_to_all, send, receive)
    return fault, rank.recover()


@plays(28)
@pytest.mark.parametrize("hosts, rows", [("000", 2), ("000", 100_000), ("01", 2), ("01", 100_000)])
def test_splits_of_all_to_all(jobs, hosts, rows):
    job = jobs(len(hosts), splits_differ, rows, hosts=hosts)
    answers = job.hear_all()
    job.after_fault(answers, "all_to_all", within=SOON)
    for fault, _ in answers.values():
        told = cause(fault)
        assert "mismatch" in told, fault.text
        assert re.search(r"rank 0\b", told) and re.search(r"rank 1\b", told), fault.text
        assert str(4 * rows) in told and str(4 * (rows + 1)) in told, fault.text


def message_differs(rank: Rank, sent, expected, used: bool, slow: float):
    store = Slow(rank.store("first"))
    (rank.used if used else rank.init)(store=store)
    store.seconds = slow if rank.rank == 0 else 0.0
    count, dtype = sent if rank.rank == 0 else expected
    tensor = torch.ones(count, dtype=dtype)
    if rank.rank == 0:
        work = dist.isend(tensor, 1, tag=9)
        fault = catch(work.wait) if used else None
    else:
        fault = catch(dist.recv, tensor, 0, tag=9)
    tensor = torch.ones(1)
    later = catch(dist.all_reduce, tensor) if used else catch(dist.recv, tensor, 1 - rank.rank)
    return fault, later


F32, I32 = torch.float32, torch.int32


@pytest.mark.parametrize(
    "hosts, sent, expected, used, slow",
    [
        ("00", (10, F32), (11, F32), True, 0.0),
        ("00", (10, F32), (10, I32), True, 0.0),
        ("00", (1 << 20, F32), (1 << 19, F32), True, 0.0),
        ("01", (8, F32), (9, F32), False, 0.0),
        # Rank 1 has told of it and ended before rank 0 has an answer from its store.
        ("01", (8, F32), (9, F32), False, 0.07),
        ("01", (3_000_000, F32), (8, F32), False, 0.0),
        ("01", (8, F32), (3_000_000, F32), False, 0.0),
    ],
)
def test_message_of_another_size_or_dtype(jobs, hosts, sent, expected, used, slow):
    answers = jobs(2, message_differs, sent, expected, used, slow, hosts=hosts).hear_all()
    (count, dtype), (room, other) = sent, expected
    fault, _ = answers[1]
    shown = f"sends {str(dtype)[6:]}[{count}]", f"{str(other)[6:]}[{room}]", "tag 9"
    assert_raised(fault, "Detected mismatch", *shown, within=SOON)
    # A small message is sent when it is posted; a large one shows the fault to its sender, too.
    if used and count > 1000:
        assert answers[0][0] is not None
    for _, later in answers.values():
        assert_raised(later, "mismatch", within=SOON)


@plays(53)
@on_ranks(2, world="jobs")
def test_bad_arguments_are_local(rank):
    """Wrong on one rank alone: raised there before anything is sent, so that the group lives."""
    rank.used()
    if rank.rank == ODD:
        for arguments in ((torch.ones(3), dist.ReduceOp.BAND), (torch.ones(1).expand(3),)):
            fault = catch(dist.all_reduce, *arguments)
            assert fault is not None and {"ValueError", "TypeError"} & set(fault.bases), fault
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()
