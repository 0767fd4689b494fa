"""Faults of groups on several hosts, pretended by FASTCOLL_HOST_ID: ranks 0 and 1 on one, 2 and 3 on another."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from suite_rules import bound
from test_control import call_all_reduce, call_recv, call_wait

NOTICED = 1.0
TIMEOUT = 1.0


def start(rank: Rank):
    os.environ["FASTCOLL_HOST_ID"] = "0011"[rank.rank]
    rank.used()


def repeats(rank: Rank):
    start(rank)
    tell_in_call(rank, 3)

    def forever():
        while True:
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert torch.all(tensor == rank.size)

    fault = catch(forever)
    begin = time.monotonic()
    dist.destroy_process_group()
    return fault, time.monotonic() - begin, rank.left()


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, id="leader0", marks=pytest.mark.full),
        pytest.param(1, id="other0", marks=pytest.mark.full),
        pytest.param(2, id="leader1"),
        pytest.param(3, id="other1"),
    ],
)
def test_a_death_is_named_on_both_hosts(jobs, victim):
    job = jobs(4, repeats)
    job.hear_all()
    killed = job.kill(victim)
    for fault, seconds, left in job.hear_all(but=[victim]).values():
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert "all_reduce" in fault.text, fault.text
        assert f"rank {victim} (pid {job.pids[victim]}, " in fault.text, fault.text
        assert fault.at - killed < bound(NOTICED)
        assert seconds < bound(1.0) and left == []
    job.ended_well(but=[victim])


def half_calls(rank: Rank, aborts: bool):
    start(rank)
    if rank.rank >= 2:
        rank.tell("ready")
        rank.hear()
        if aborts and rank.rank == 3:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
            return None
    else:
        tell_in_call(rank)
    return catch(dist.all_reduce, torch.ones(10))


def test_a_death_on_a_host_that_calls_nothing_is_named_on_the_other(jobs):
    job = jobs(4, half_calls, False)
    job.hear_all()
    killed = job.kill(3)
    for fault in (job.hear(0), job.hear(1)):
        assert fault is not None and f"rank 3 (pid {job.pids[3]}, " in fault.text, fault
        assert fault.at - killed < bound(NOTICED)
    job.tell(2)
    fault = job.hear(2)
    assert f"rank 3 (pid {job.pids[3]}, " in fault.text, fault
    job.ended_well(but=[3])


def test_an_abort_on_a_host_whose_leader_calls_nothing_reaches_the_other(jobs):
    job = jobs(4, half_calls, True)
    job.hear_all()
    since = time.monotonic()
    job.tell(3)
    for fault in (job.hear(0), job.hear(1)):
        assert fault is not None and "rank 3 aborted the group" in fault.text, fault
        assert fault.at - since < bound(NOTICED)
    job.tell(2)
    assert "rank 3 aborted the group" in job.hear(2).text
    job.hear(3)
    job.ended_well()


def one_waits(rank: Rank, late):
    start(rank)
    rank.tell("ready")
    rank.hear()
    soon(TIMEOUT)
    fault = catch(dist.all_reduce, torch.ones(10))
    if (
        fault is None and rank.rank in late
    ):  # it had the others' data, and their fault was still on its way here
        fault = catch(dist.all_reduce, torch.ones(10))
    return fault


@pytest.mark.parametrize("late", [[1], pytest.param([2], marks=pytest.mark.full), [3], [2, 3]])
def test_a_timeout_says_who_has_not_arrived(jobs, late):
    job = jobs(4, one_waits, late)
    job.hear_all()
    waiting = [rank for rank in job.pids if rank not in late]
    for rank in waiting:
        job.tell(rank)
    faults = job.hear_all(but=late)
    for rank in late:
        job.tell(rank)
    for fault in faults.values():
        assert fault is not None and "timed out" in fault.text.lower(), fault
        assert "not arrived" in fault.text, fault.text
        missing = fault.text[fault.text.lower().index("not arrived") :]
        assert all(f"rank {rank} (pid {job.pids[rank]}" in missing for rank in late), fault.text
    longest = max(fault.seconds for fault in faults.values())  # the first tells the others
    assert TIMEOUT - 0.1 < longest < TIMEOUT + bound(0.5), faults
    for rank in late:
        assert job.hear(rank) is not None
    job.ended_well()


def never_calls(rank: Rank, call):
    rank.used()
    rank.tell("ready")
    rank.hear()
    soon(TIMEOUT)
    return catch(call, rank)


@pytest.mark.parametrize(
    "call",
    [call_all_reduce, *(pytest.param(c, marks=pytest.mark.full) for c in (call_wait, call_recv))],
)
def test_a_rank_never_calls_over_gloo(jobs, call):
    job = jobs(2, never_calls, call, environment={"FASTCOLL_TRANSPORT": "gloo"})
    job.hear_all()
    job.tell(0)
    fault = job.hear(0)
    assert fault is not None and fault.kind == "DistBackendError", fault
    assert "timed out" in fault.text.lower() and "seq" in fault.text, fault.text
    assert ("recv" if call is call_recv else "all_reduce") in fault.text
    assert TIMEOUT - 0.1 < fault.seconds < TIMEOUT + bound(0.5), fault
    time.sleep(0.3)  # for Gloo's thread of the other rank to see that the connection is closed
    job.tell(1)
    assert job.hear(1) is not None
    job.ended_well()


def one_aborts(rank: Rank):
    start(rank)
    if rank.rank == 3:
        rank.tell("ready")
        rank.hear()
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        return time.monotonic()
    tell_in_call(rank)
    return catch(dist.all_reduce, torch.ones(10))


def test_an_abort_reaches_both_hosts(jobs):
    job = jobs(4, one_aborts)
    job.hear_all()
    job.tell(3)
    answers = job.hear_all()
    for rank in range(3):
        assert "rank 3 aborted the group" in answers[rank].text, answers[rank]
        assert answers[rank].at - answers[3] < bound(NOTICED)
    job.ended_well()


def interrupted(rank: Rank):
    start(rank)
    if rank.rank == 2:
        tell_in_call(rank)
        return catch(dist.all_reduce, torch.ones(10))
    rank.tell("ready")
    return rank.hear()


def test_ctrl_c_in_a_leader_that_waits_for_the_other_host(jobs):
    job = jobs(4, interrupted)
    job.hear_all()
    when = job.signal(2, signal.SIGINT)
    fault = job.hear(2)
    assert fault is not None and fault.kind == "KeyboardInterrupt", fault
    assert fault.at - when < bound(NOTICED)
    for rank in (0, 1, 3):
        job.tell(rank)
        job.hear(rank)
    job.ended_well()


def leaves(rank: Rank):
    """Each rank destroys the group as soon as it has its result."""
    start(rank)
    rank.tell("ready")
    for round_ in range(5):
        dist.destroy_process_group()
        rank.used(name=f"again{round_}")
        tensor = torch.full((50_000,), float(rank.rank))
        dist.all_reduce(tensor)
        assert tensor[-1].item() == 6
    dist.destroy_process_group()
    return rank.left()


def test_what_was_sent_arrives_though_its_sender_leaves(jobs):
    job = jobs(4, leaves)
    job.hear_all()
    assert all(left == [] for left in job.hear_all().values())
    job.ended_well()


def long_ones(rank: Rank):
    os.environ["FASTCOLL_HOST_ID"] = str(rank.rank)
    rank.used()
    tensor = torch.ones(20_000_000)
    tell_in_call(rank, 2)

    def forever():
        while True:
            dist.all_reduce(tensor)
            tensor.fill_(1.0)

    return catch(forever)


def test_a_death_within_a_long_message_is_noticed(jobs):
    job = jobs(2, long_ones)
    job.hear_all()
    killed = job.kill(1)
    fault = job.hear(0)
    assert f"rank 1 (pid {job.pids[1]}, " in fault.text, fault.text
    assert fault.at - killed < bound(NOTICED)
    job.ended_well(but=[1])


def exchanges(rank: Rank, timeout):
    """Messages that pass by the leaders, from rank to rank."""
    start(rank)
    soon(timeout)
    tell_in_call(rank, 2)

    def forever():
        while True:
            inputs = [torch.full((300_000,), float(rank.rank)) for _ in range(rank.size)]
            outputs = [torch.empty_like(tensor) for tensor in inputs]
            dist.all_to_all(outputs, inputs)
            assert [tensor[-1].item() for tensor in outputs] == [0, 1, 2, 3]

    fault = catch(forever)
    return fault, rank.recover(
        [r for r in (0, 2) if r != rank.rank]
    ) if rank.rank % 2 == 0 else None


@pytest.mark.parametrize("victim", [1, 3])
def test_a_death_among_long_messages_is_named(jobs, victim):
    job = jobs(4, exchanges, 30.0)
    job.hear_all()
    killed = job.kill(victim)
    for fault, after in job.hear_all(but=[victim]).values():
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert f"rank {victim} (pid {job.pids[victim]}, " in fault.text, fault.text
        assert fault.at - killed < bound(NOTICED)
        assert after is None or after["left"] == []
    job.ended_well(but=[victim])


@pytest.mark.full  # the timeout covers calls of ranks that are only slow, so it is long
def test_a_timeout_among_long_messages_says_who_is_stopped(jobs):
    job = jobs(4, exchanges, 4.0)
    job.hear_all()
    job.signal(3, signal.SIGSTOP)
    faults = {rank: job.hear(rank) for rank in (0, 1, 2)}
    job.signal(3, signal.SIGCONT)
    for fault, after in faults.values():
        assert fault is not None and "timed out" in fault.text.lower(), fault
        assert f"rank 3 (pid {job.pids[3]}, " in fault.text, fault.text
        assert after is None or after["left"] == []
    assert job.hear(3)[0] is not None
    job.ended_well()


def scatters(rank: Rank):
    """One rank gives another part than the others expect."""
    start(rank)
    parts = [torch.ones(100_001 if rank.rank == 3 else 100_000) for _ in range(rank.size)]
    return catch(dist.scatter, torch.empty_like(parts[0]), parts if rank.rank == 3 else None, 3)


def has_other_roots(rank: Rank):
    """Each host has its own root, which is not its leader: so both leaders give, and the roots wait."""
    start(rank)
    root = 1 if rank.rank < 2 else 3
    tensor = torch.empty(100_000)
    parts = [tensor] * rank.size if rank.rank == root else None
    return catch(dist.scatter, tensor, parts, root) or catch(dist.barrier)


def scatters_or_broadcasts(rank: Rank):
    """One host broadcasts from a rank of its own, and waits for nobody; the other scatters."""
    start(rank)
    tensor = torch.empty(100_000)
    if rank.rank >= 2:
        return catch(dist.broadcast, tensor, 3) or catch(dist.barrier)
    parts = [tensor] * rank.size if rank.rank == 1 else None
    return catch(dist.scatter, tensor, parts, 1) or catch(dist.barrier)


def splits_differ(rank: Rank):
    """In the group's first long messages, when ranks are not connected yet."""
    start(rank)
    sizes = [[50_000 + ((s, r) == (0, 3)) for r in range(4)] for s in range(4)]
    inputs = [torch.ones(size) for size in sizes[rank.rank]]
    return catch(dist.all_to_all, [torch.empty(50_000) for _ in range(4)], inputs)


@pytest.mark.parametrize(
    "calls", [scatters, has_other_roots, scatters_or_broadcasts, splits_differ]
)
def test_calls_with_long_messages_that_differ_are_named(jobs, calls):
    job = jobs(4, calls)
    for fault in job.hear_all().values():
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert "mismatch between collectives on ranks" in fault.text, fault.text
        assert fault.seconds < bound(1.5)
    job.ended_well()
