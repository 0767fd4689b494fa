"""Faults that several ranks notice, or that follow each other: all ranks name the first cause, and the same."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from in_time import cause
from rank_calls import all_reduce, repeated
from suite_rules import bound

NOTICED = 1.0
OVER_GLOO = {"FASTCOLL_SHARED_MEMORY": "off"}

transports = pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["shm", "gloo"])


def assert_one_cause(faults, *patterns: str, since: float | None = None) -> None:
    faults = list(faults)
    causes = {cause(fault) for fault in faults}
    assert len(causes) == 1, "\n".join(sorted(causes))
    for pattern in patterns:
        assert re.search(pattern, *causes), f"{pattern!r} is not in {causes}"
    if since is not None:
        assert max(fault.at for fault in faults) - since < bound(NOTICED)


def died(job, rank: int) -> str:
    return rf"{re.escape(job.name(rank))}.*died"


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
    for faults in zip(*jobs(4, disagree, 60).hear_all(timeout=60.0).values(), strict=True):
        assert_one_cause(faults, r"rank \d.* runs all_reduce.*rank \d \(pid \d+.* runs all_reduce")


def dies_or_disagrees(rank: Rank):
    rank.used()
    rank.pause()
    rank.tell(catch(dist.all_reduce, torch.ones(8 + (rank.rank == 3))))
    dist.destroy_process_group()


def test_a_death_and_a_mismatch_at_once(jobs):
    for attempt in range(4):
        job = jobs.ready(4, dies_or_disagrees)
        job.tell(0, 2, 3)
        time.sleep(0.001 * attempt)
        job.kill(1)
        assert_one_cause(
            job.hear_all(but=[1]).values(),
            r"rank 1 \(pid \d+.*died|rank 3.*float32\[9\]|float32\[9\].*rank 3",
        )


# --- noticed by some, who go at once -------------------------------------------------------------


def aborts_at_once(rank: Rank):
    """What programs do that give up: they abort the group, so that others do not wait."""
    rank.used()
    tell_in_call(rank, 3)
    fault = repeated(all_reduce, rank, 50_000)
    dist.distributed_c10d._abort_process_group()
    rank.tell(fault)


@transports
def test_killed_and_the_others_abort(jobs, environment):
    for _ in range(2):
        job = jobs.ready(4, aborts_at_once, environment=environment)
        killed = job.kill(2)
        assert_one_cause(job.hear_all(but=[2]).values(), died(job, 2), since=killed)


def goes_at_once(rank: Rank, uses_before: bool):
    rank.init()
    if uses_before:
        dist.all_reduce(torch.ones(3))
    if rank.rank == 1:
        rank.pause()
    tell_in_call(rank)
    rank.tell(catch(dist.all_reduce, torch.ones(3)))
    os._exit(0)


@transports
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
    assert_one_cause([*faults, job.hear(2)], died(job, 1))


# --- ranks that do not know each other -----------------------------------------------------------


def waits_for_the_one_before(rank: Rank):
    rank.init()
    tensor = torch.ones(3)
    if rank.rank < rank.size - 1:
        dist.send(tensor, rank.rank + 1)
    if rank.rank > 0:
        dist.recv(tensor, rank.rank - 1)
    if rank.rank == 0:
        rank.pause()
    tell_in_call(rank)
    fault = catch(dist.recv, tensor, rank.rank - 1)
    rank.tell(fault)
    rank.hear()  # nobody leaves before all have heard
    rank.finish()


def test_a_chain_of_receivers_hears_of_its_head(jobs):
    job = jobs.ready(5, waits_for_the_one_before)
    killed = job.kill(0)
    assert_one_cause(job.hear_all(but=[0]).values(), died(job, 0), since=killed)
    job.tell(*range(1, 5))
    job.hear_all(but=[0])


# --- one rank gives up ---------------------------------------------------------------------------


def one_aborts(rank: Rank, aborts: int, away: list[int]):
    rank.used()
    if rank.rank in (aborts, *away):
        rank.pause()
    else:
        tell_in_call(rank)
    if rank.rank == aborts:
        dist.distributed_c10d._abort_process_group()
        return None
    return catch(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize(
    "hosts, aborts, away",
    # Last, a host whose leader calls nothing.
    [("000", 1, []), ("012", 1, []), ("0011", 3, []), ("0011", 3, [2])],
)
def test_an_abort_is_told_to_those_who_wait(jobs, hosts, aborts, away):
    job = jobs.ready(len(hosts), one_aborts, aborts, away, hosts=hosts)
    since = time.monotonic()
    job.tell(aborts)
    waiting = job.hear_all(but=[aborts, *away]).values()
    assert_one_cause(waiting, f"rank {aborts} aborted the group", since=since)
    for rank in away:
        job.tell(rank)
        assert_one_cause([*waiting, job.hear(rank)])
    assert job.hear(aborts) is None


# --- a fault of an earlier group of the same name ------------------------------------------------


def two_lives(rank: Rank, first: int):
    """The first ends with a fault that rank 0 tells; the second has the same name and store."""
    rank.init()
    soon(0.5)
    fault = catch(dist.all_reduce, torch.ones(10)) if rank.rank == 0 else None
    dist.destroy_process_group()
    rank.tell(fault)
    rank.hear()
    if rank.rank == first:
        tell_in_call(rank)
    return lives(rank)


def lives(rank: Rank):
    rank.init()
    tensor = torch.ones(10)
    fault = catch(dist.all_reduce, tensor)
    dist.destroy_process_group()
    return fault, tensor[0].item()


@transports
@pytest.mark.parametrize("first", [0, 1])
def test_the_fault_of_an_earlier_life_is_not_this_one_s(jobs, first, environment):
    job = jobs(2, two_lives, first, environment=environment)
    assert "Timed out after 500 ms" in job.hear_all()[0].text
    job.tell(first)
    assert job.hear(first) == "in call"
    job.tell(1 - first)
    assert set(job.hear_all().values()) == {(None, 2.0)}


def fails_and_is_killed(rank: Rank):
    rank.init()
    soon(0.5)
    rank.tell(catch(dist.all_reduce, torch.ones(10)) if rank.rank == 0 else None)
    rank.hear()


def takes_their_place(rank: Rank):
    if rank.rank == 0:
        rank.hear()
    return lives(rank)


def test_the_fault_of_a_rank_that_was_killed_is_not_the_next_one_s(jobs):
    """What the killed rank wrote is still in the store, and so is its record."""
    job = jobs(2, fails_and_is_killed, prefix="killed/")
    assert "Timed out after 500 ms" in job.hear_all()[0].text
    came = jobs.key(job, r"/c/\d+$").rpartition("/")[2]
    for rank in job.pids:
        job.kill(rank)
    assert [job.end(rank) for rank in job.pids] == [-9] * 2
    job = jobs(2, takes_their_place, prefix="killed/")
    jobs.key(job, rf"/c/(?!{came}$)\d+$")  # rank 1 waits, and reads the record
    job.tell(0)
    assert set(job.hear_all().values()) == {(None, 2.0)}
