"""Ranks that call different things: at once an error on every rank that names both calls.

Target: as soon as both have called.
"""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from backend import reduce_scatter_single
from fault_list import plays
from fault_rank import Rank, catch
from in_time import in_time
from suite_rules import bound

SOON = 1.0
ODD = 1
"""The rank that calls something else."""


def all_reduce(count=10, dtype=torch.float32, op="SUM"):
    dist.all_reduce(torch.ones(count, dtype=dtype), op=getattr(dist.ReduceOp, op))


def fused(wire):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.all_reduce_fused([torch.ones(10)], dist.ReduceOp.SUM, wire)


def premul(factor):
    dist.all_reduce(torch.ones(10), op=dist._make_nccl_premul_sum(factor))


def all_reduce_async(count):
    dist.all_reduce(torch.ones(count), async_op=True).wait()


def broadcast(root, count=10):
    dist.broadcast(torch.ones(count), root)


def reduce(root):
    dist.reduce(torch.ones(10), root)


def gather(root, count=4):
    lists = [torch.ones(count) for _ in range(3)] if dist.get_rank() == root else None
    dist.gather(torch.ones(count), lists, root)


def scatter(root, count=4):
    lists = [torch.ones(count) for _ in range(3)] if dist.get_rank() == root else None
    dist.scatter(torch.ones(count), lists, root)


def all_gather(count):
    dist.all_gather([torch.ones(count) for _ in range(3)], torch.ones(count))


def reduce_scatter(count):
    reduce_scatter_single(torch.ones(count), torch.ones(3 * count))


def barrier():
    dist.barrier()


def all_to_all(send, receive):
    dist.all_to_all_single(torch.ones(sum(receive)), torch.ones(sum(send)), receive, send)


CASES = {
    # name: (what the others call, what the odd rank calls, the two as the text must show them)
    "small shapes": ((all_reduce, 10), (all_reduce, 11), "float32[10], SUM", "float32[11], SUM"),
    "large shapes": (
        (all_reduce, 1_000_000),
        (all_reduce, 1_000_001),
        "float32[1000000], SUM",
        "float32[1000001], SUM",
    ),
    "small and large": (
        (all_reduce, 10),
        (all_reduce, 1_000_000),
        "float32[10], SUM",
        "float32[1000000], SUM",
    ),
    "empty and not": ((all_reduce, 0), (all_reduce, 5), "float32[0], SUM", "float32[5], SUM"),
    "async": ((all_reduce_async, 10), (all_reduce_async, 20), "float32[10]", "float32[20]"),
    "sync and async": ((all_reduce, 10), (all_reduce_async, 20), "float32[10]", "float32[20]"),
    "dtypes of one size": (
        (all_reduce, 10, torch.float32),
        (all_reduce, 10, torch.int32),
        "float32[10]",
        "int32[10]",
    ),
    "dtypes of two sizes": (
        (all_reduce, 10, torch.float32),
        (all_reduce, 10, torch.float64),
        "float32[10]",
        "float64[10]",
    ),
    "dtypes with equal bytes": (
        (all_reduce, 10, torch.float32),
        (all_reduce, 20, torch.bfloat16),
        "float32[10]",
        "bfloat16[20]",
    ),
    "ops": (
        (all_reduce, 10, torch.float32, "SUM"),
        (all_reduce, 10, torch.float32, "MAX"),
        "float32[10], SUM",
        "float32[10], MAX",
    ),
    "factors": ((premul, 2.0), (premul, 3.0), "PREMUL_SUM by 2", "PREMUL_SUM by 3"),
    "wire dtypes": ((fused, None), (fused, torch.bfloat16), "float32[10]", "bfloat16[10]"),
    "roots of broadcast": ((broadcast, 0), (broadcast, 1), "root 0", "root 1"),
    "roots of large broadcast": (
        (broadcast, 0, 1_000_000),
        (broadcast, 1, 1_000_000),
        "root 0",
        "root 1",
    ),
    "roots of reduce": ((reduce, 0), (reduce, 1), "root 0", "root 1"),
    "roots of gather": ((gather, 0), (gather, 1), "root 0", "root 1"),
    "roots of scatter": ((scatter, 0), (scatter, 1), "root 0", "root 1"),
    "roots of large gather": ((gather, 0, 100_000), (gather, 1, 100_000), "root 0", "root 1"),
    "roots of large scatter": ((scatter, 0, 100_000), (scatter, 1, 100_000), "root 0", "root 1"),
    "sizes of all_gather": ((all_gather, 5), (all_gather, 6), "float32[5]", "float32[6]"),
    "sizes of reduce_scatter": (
        (reduce_scatter, 5),
        (reduce_scatter, 6),
        "float32[5]",
        "float32[6]",
    ),
    "all_reduce and barrier": ((all_reduce, 10), (barrier,), "all_reduce(seq 2", "barrier(seq 2"),
    "all_reduce and broadcast": (
        (all_reduce, 10),
        (broadcast, 0),
        "all_reduce(seq 2",
        "broadcast(seq 2",
    ),
    "all_gather and reduce_scatter": (
        (all_gather, 100_000),
        (reduce_scatter, 100_000),
        "all_gather(seq 2",
        "reduce_scatter(seq 2",
    ),
    "broadcast and gather": ((broadcast, 0), (gather, 0), "broadcast(seq 2", "gather(seq 2"),
}


IN_SHORT = {
    "small shapes",
    "large shapes",
    "small and large",
    "empty and not",
    "sync and async",
    "dtypes of one size",
    "ops",
    "factors",
    "wire dtypes",
    "roots of broadcast",
    "sizes of all_gather",
    "all_reduce and barrier",
    "all_reduce and broadcast",
    "all_gather and reduce_scatter",
}


FAULTS = {
    "small shapes": 23,
    "small and large": 23,
    "dtypes of one size": 24,
    "dtypes of two sizes": 24,
    "ops": 25,
    "roots of broadcast": 26,
    "roots of reduce": 26,
    "all_reduce and broadcast": 27,
    "broadcast and gather": 27,
}


def tiered(cases, short):
    """Return the names of cases, of which those not in ``short`` are full."""
    return [pytest.param(n, marks=[] if n in short else pytest.mark.full) for n in cases]


def of_faults(params):
    """Return the parameters, those that play a listed fault with its mark."""
    return [
        pytest.param(name, marks=[*param.marks, *([plays(FAULTS[name])] if name in FAULTS else [])])
        for param in params
        for name in param.values
    ]


def differ(rank: Rank, others, odd):
    rank.used()
    function, *arguments = odd if rank.rank == ODD else others
    rank.tell("ready")
    rank.hear()
    fault = catch(function, *arguments)
    return fault, rank.recover([r for r in range(rank.size) if r != rank.rank])


@pytest.mark.parametrize("case", of_faults(tiered(CASES, IN_SHORT)))
def test_mismatch(jobs, case):
    others, odd, one, other = CASES[case]
    job = jobs(3, differ, others, odd)
    job.hear_all()
    start = time.monotonic()
    job.tell_all()
    for rank, (fault, after) in job.hear_all().items():
        assert fault is not None, f"rank {rank} has no error: success was reported"
        in_time(fault.at - start, SOON, fault.text)
        assert fault.kind == "DistBackendError", fault
        assert "mismatch between collectives on ranks" in fault.text, fault.text
        assert one in fault.text and other in fault.text, fault.text
        assert re.search(r"seq 2\b", fault.text)
        assert re.search(rf"\brank {ODD}\b", fault.text.partition("]: ")[2]), fault.text
        assert "same collectives in the same order" in fault.text, "what to do"
        assert after["again"] is not None and after["again"].seconds < bound(0.5)
        assert after["state"] == "COMM_ERROR"
        assert after["destroy"] < bound(1.0) and after["left"] == []
    job.ended_well()


def differ_between_hosts(rank: Rank, others, odd):
    os.environ["FASTCOLL_HOST_ID"] = str(rank.rank)
    rank.used()
    function, *arguments = odd if rank.rank == ODD else others
    rank.tell("ready")
    rank.hear()
    faults = (catch(*call) for call in [(function, *arguments), (dist.barrier,), (dist.barrier,)])
    return next(filter(None, faults), None), rank.recover([r for r in range(3) if r != rank.rank])


@pytest.mark.parametrize(
    "case",
    tiered(
        [name for name in CASES if "broadcast" in name or "root" in name],
        {"roots of gather", "all_reduce and broadcast"},
    ),
)
def test_between_hosts_a_rank_may_hear_of_it_in_its_next_calls(jobs, case):
    others, odd, one, other = CASES[case]
    job = jobs(3, differ_between_hosts, others, odd)
    job.hear_all()
    start = time.monotonic()
    job.tell_all()
    for rank, (fault, after) in job.hear_all().items():
        assert fault is not None, f"rank {rank} has no error"
        assert fault.kind == "DistBackendError" and fault.at - start < bound(SOON), fault
        assert "mismatch between collectives on ranks" in fault.text, fault.text
        assert one in fault.text and other in fault.text, fault.text
        assert re.search(rf"\brank {ODD}\b", fault.text.partition("]: ")[2]), fault.text
        assert after["again"] is not None and after["left"] == []
    job.ended_well()


def differ_behind_an_answer(rank: Rank):
    os.environ["FASTCOLL_HOST_ID"] = str(rank.rank)
    rank.used()
    gather(0)  # what rank 0 says to it lies before what tells of the next
    fault = catch(gather, 1 if rank.rank == 2 else 0, 100_000) or catch(dist.barrier)
    return fault, rank.recover([r for r in range(3) if r != rank.rank])


def test_another_root_in_a_long_gather_after_a_short_one(jobs):
    job = jobs(3, differ_behind_an_answer)
    for rank, (fault, after) in job.hear_all().items():
        assert fault is not None, f"rank {rank} has no error"
        assert fault.kind == "DistBackendError" and fault.seconds < bound(SOON), fault
        assert "mismatch between collectives on ranks" in fault.text, fault.text
        assert after["left"] == []
    job.ended_well()


def splits_differ(rank: Rank, rows):
    rank.used()
    send, receive = [rows] * 3, [rows] * 3
    if rank.rank == 0:
        send[1] = rows + 1  # rank 1 expects `rows`
    fault = catch(all_to_all, send, receive)
    return fault, rank.recover([r for r in range(rank.size) if r != rank.rank])


@plays(28)
@pytest.mark.parametrize("rows", [2, 100_000], ids=["small", "large"])
def test_splits_of_all_to_all(jobs, rows):
    job = jobs(3, splits_differ, rows)
    answers = job.hear_all()
    for rank, (fault, after) in answers.items():
        assert fault is not None, f"rank {rank} has no error: success was reported"
        in_time(fault.seconds, SOON, fault.text)
        assert fault.kind == "DistBackendError", fault
        cause = fault.text.partition("]: ")[2]
        assert "mismatch" in cause and "all_to_all" in fault.text, fault.text
        assert re.search(r"rank 0\b", cause) and re.search(r"rank 1\b", cause), fault.text
        assert str(4 * rows) in cause and str(4 * (rows + 1)) in cause, fault.text
        assert after["left"] == []
    job.ended_well()


def message_differs(rank: Rank, sent, expected):
    rank.used()
    if rank.rank == 0:
        fault = catch(lambda: dist.send(torch.ones(sent[0], dtype=sent[1]), 1, tag=9))
        later = catch(dist.all_reduce, torch.ones(3))
    else:
        fault = catch(dist.recv, torch.ones(expected[0], dtype=expected[1]), 0, tag=9)
        later = catch(dist.all_reduce, torch.ones(3))
    return fault, later


@pytest.mark.parametrize(
    ("sent", "expected", "texts"),
    [
        ((10, torch.float32), (11, torch.float32), ("float32[10]", "float32[11]")),
        ((10, torch.float32), (10, torch.int32), ("float32[10]", "int32[10]")),
        ((1 << 20, torch.float32), (1 << 19, torch.float32), ("1048576", "524288")),
    ],
    ids=["size", "dtype", "large"],
)
def test_message_of_another_size_or_dtype(jobs, sent, expected, texts):
    job = jobs(2, message_differs, sent, expected)
    answers = job.hear_all()
    fault, _ = answers[1]
    assert fault is not None and fault.kind == "DistBackendError" and fault.seconds < bound(SOON), (
        fault
    )
    assert "mismatch" in fault.text and "tag 9" in fault.text, fault.text
    assert all(text in fault.text for text in texts), fault.text
    # A small message is sent when it is posted; a large one shows the fault to its sender, too.
    if sent[0] > 1000:
        assert answers[0][0] is not None
    for _, later in answers.values():
        assert later is not None and "mismatch" in later.text
    job.ended_well()


def bad_arguments(rank: Rank):
    """Wrong on one rank alone: raised there before anything is sent, so that the group lives."""
    rank.used()
    if rank.rank == ODD:
        float_bits = catch(dist.all_reduce, torch.ones(3), op=dist.ReduceOp.BAND)
        overlapping = catch(dist.all_reduce, torch.ones(1).expand(3))
    else:
        float_bits = overlapping = None
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return float_bits, overlapping, tensor.tolist()


@plays(53)
def test_bad_arguments_are_local(jobs):
    job = jobs(2, bad_arguments)
    answers = job.hear_all()
    for fault in answers[ODD][:2]:
        assert fault is not None and {"ValueError", "TypeError"} & set(fault.bases), fault
    assert [answer[2] for answer in answers.values()] == [[2.0] * 3] * 2
    job.ended_well()
