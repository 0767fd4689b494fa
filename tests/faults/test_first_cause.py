"""Faults that several ranks notice, or that follow each other: all ranks name the first cause, and the same."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import tell_in_call
from suite_rules import bound

NOTICED = 1.0
OVER_GLOO = {"FASTCOLL_TRANSPORT": "gloo"}


def cause(fault) -> str:
    assert fault is not None, "no error"
    return fault.text.partition("]: ")[2]


def assert_one_cause(faults, *patterns: str) -> None:
    causes = {cause(fault) for fault in faults}
    assert len(causes) == 1, "\n".join(sorted(causes))
    for pattern in patterns:
        assert re.search(pattern, *causes), f"{pattern!r} is not in {causes}"


# --- noticed by all at once ----------------------------------------------------------------------


def disagree(rank: Rank, rounds: int):
    rank.used()
    # Each round breaks a group for good.
    groups = [dist.new_group(list(range(rank.size))) for _ in range(rounds)]
    for group in groups:
        dist.barrier(group)
    faults = []
    for group in groups:
        dist.barrier()
        faults.append(catch(dist.all_reduce, torch.ones(10 + rank.rank), group=group))
    dist.destroy_process_group()
    return faults


def test_ranks_that_all_disagree_name_one_pair(jobs):
    """Four ranks with four sizes: each compares with another one first."""
    job = jobs(4, disagree, 60)
    for faults in zip(*job.hear_all(timeout=60.0).values(), strict=True):
        assert_one_cause(faults, r"rank \d.* runs all_reduce.*rank \d \(pid \d+.* runs all_reduce")
    job.ended_well()


def dies_or_disagrees(rank: Rank):
    rank.used()
    rank.tell("ready")
    rank.hear()
    rank.tell(catch(dist.all_reduce, torch.ones(8 + (rank.rank == 3))))
    dist.destroy_process_group()


def test_a_death_and_a_mismatch_at_once(jobs):
    for attempt in range(8):
        job = jobs(4, dies_or_disagrees)
        job.hear_all()
        for rank in (0, 2, 3):
            job.tell(rank)
        time.sleep(0.0005 * attempt)
        job.kill(1)
        faults = job.hear_all(but=[1]).values()
        assert_one_cause(
            faults, r"rank 1 \(pid \d+.*died|rank 3.*float32\[9\]|float32\[9\].*rank 3"
        )
        job.ended_well(but=[1])


# --- noticed by some, who go at once -------------------------------------------------------------


def aborts_at_once(rank: Rank):
    """What programs do that give up: they abort the group, so that others do not wait."""
    rank.used()
    tell_in_call(rank, 3)

    def forever():
        while True:
            dist.all_reduce(torch.ones(50_000))

    fault = catch(forever)
    dist.distributed_c10d._abort_process_group()
    rank.tell(fault)


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["shm", "gloo"])
def test_killed_and_the_others_abort(jobs, environment):
    for _ in range(4):
        job = jobs(4, aborts_at_once, environment=environment)
        job.hear_all()
        killed = job.kill(2)
        faults = job.hear_all(but=[2]).values()
        assert_one_cause(faults, rf"rank 2 \(pid {job.pids[2]}\b.*died")
        assert max(fault.at for fault in faults) - killed < bound(NOTICED)
        job.ended_well(but=[2])


def goes_at_once(rank: Rank, uses_before: bool):
    rank.init()
    if uses_before:
        dist.all_reduce(torch.ones(3))
    if rank.rank == 1:
        rank.tell("ready")
        rank.hear()
    tell_in_call(rank)
    rank.tell(catch(dist.all_reduce, torch.ones(3)))
    os._exit(0)


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["shm", "gloo"])
@pytest.mark.parametrize("uses_before", [False, True], ids=["first", "later"])
def test_who_looks_late_hears_who_died_first(jobs, environment, uses_before):
    """Rank 0 notices and goes, before rank 2 looks: both processes are gone then."""
    job = jobs(3, goes_at_once, uses_before, environment=environment)
    job.hear_all()  # ranks 0 and 2 wait for rank 1
    job.signal(2, signal.SIGSTOP)
    job.kill(1)
    faults = [job.hear(0)]
    assert job.end(0) == 0
    job.signal(2, signal.SIGCONT)
    faults.append(job.hear(2))
    assert_one_cause(faults, rf"rank 1 \(pid {job.pids[1]}\b.*died")
    job.ended_well(but=[1])


# --- ranks that do not know each other -----------------------------------------------------------


def waits_for_the_one_before(rank: Rank):
    rank.init()
    tensor = torch.ones(3)
    if rank.rank < rank.size - 1:
        dist.send(tensor, rank.rank + 1)
    if rank.rank > 0:
        dist.recv(tensor, rank.rank - 1)
    if rank.rank == 0:
        rank.tell("ready")
        rank.hear()
    tell_in_call(rank)
    fault = catch(dist.recv, tensor, rank.rank - 1)
    rank.tell(fault)
    rank.hear()  # nobody leaves before all have heard
    dist.destroy_process_group()
    return rank.left()


def test_a_chain_of_receivers_hears_of_its_head(jobs):
    job = jobs(5, waits_for_the_one_before)
    job.hear_all()
    killed = job.kill(0)
    faults = job.hear_all(but=[0]).values()
    assert_one_cause(faults, rf"rank 0 \(pid {job.pids[0]}\b.*died")
    assert max(fault.at for fault in faults) - killed < bound(NOTICED)
    for rank in range(1, 5):
        job.tell(rank)
    assert set(map(tuple, job.hear_all(but=[0]).values())) == {()}
    job.ended_well(but=[0])


# --- one rank gives up ---------------------------------------------------------------------------


def one_aborts(rank: Rank):
    rank.used()
    if rank.rank == 1:
        rank.tell("ready")
        rank.hear()
        dist.distributed_c10d._abort_process_group()
        return None
    tell_in_call(rank)
    return catch(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["shm", "gloo"])
def test_an_abort_is_told_to_those_who_wait(jobs, environment):
    job = jobs(3, one_aborts, environment=environment)
    job.hear_all()
    since = time.monotonic()
    job.tell(1)
    answers = job.hear_all()
    faults = [answers[0], answers[2]]
    assert_one_cause(faults, "rank 1 aborted the group")
    assert max(fault.at for fault in faults) - since < bound(NOTICED)
    job.ended_well()
