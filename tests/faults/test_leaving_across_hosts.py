"""Faults between hosts while two hosts connect, and while one rank leaves: the error names that rank."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_time import assert_raised
from odd_stores import HidesLinks
from suite_rules import bound, full


def aborts(rank: Rank):
    rank.hear()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()


def connects(rank: Rank, gives_up: int):
    """Rank ``gives_up`` has told the other one where to connect, and does not find it, when rank 2 aborts the group."""
    store = rank.store("first")
    if rank.rank == gives_up:
        store = HidesLinks(store)
        threading.Thread(target=lambda: rank.tell(store.found.wait(20)), daemon=True).start()
    rank.init(store=store)
    if rank.rank == 2:
        threading.Thread(target=aborts, args=(rank,), daemon=True).start()
    fault = catch(dist.all_reduce, torch.ones(3))
    rank.finish()
    assert rank.rank != gives_up or store.given_up.is_set()
    return fault


@pytest.mark.parametrize("gives_up", [0, 1])
def test_a_rank_that_gives_up_connects_first_if_the_other_one_has_begun(jobs, gives_up):
    job = jobs(3, connects, gives_up, hosts="012")
    assert job.hear(gives_up) is True
    job.tell(2)
    for fault in job.hear_all().values():
        assert_raised(fault, "rank 2 aborted the group")


def assert_has_left(job, fault, victim: int) -> None:
    assert_raised(fault, job.name(victim), "left the group (close notice sent)", within=1.5)


def calls_after_an_end(rank: Rank, victim: int):
    rank.used()
    rank.meet()
    if rank.rank == victim:
        return dist.destroy_process_group()
    rank.hear()
    return catch(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["leader0", "other0", "leader1", "other1"])
def test_the_end_of_a_process_that_left_is_no_death(jobs, victim):
    job = jobs(4, calls_after_an_end, victim, hosts="0011")
    assert job.hear(victim) is None and job.end(victim) == 0
    others = [rank for rank in range(4) if rank != victim]
    job.tell(*others)
    for rank in others:
        assert_has_left(job, job.hear(rank), victim)


def leaves_amid_calls(rank: Rank, count: int, rounds: int):
    """Each round another rank leaves in the middle of the others' collectives."""
    found = []
    for round_ in range(rounds):
        victim = round_ % rank.size
        rank.used(f"round{round_}")
        rank.meet(f"meet{round_}")
        tensor = torch.ones(count)
        end = time.monotonic() + 0.02 * (1 + round_ % 5) if rank.rank == victim else float("inf")

        def call(tensor=tensor, end=end):
            while time.monotonic() < end:
                dist.all_reduce(tensor)

        found.append((victim, catch(call)))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("hosts, rounds", [("01", 8), ("012", 9), ("0011", 8)])
@pytest.mark.parametrize("count", [30_000, full(3), full(3_000_000)])
def test_a_rank_that_leaves_amid_calls(jobs, hosts, count, rounds):
    job = jobs(len(hosts), leaves_amid_calls, count, rounds, hosts=hosts)
    for rank, found in job.hear_all(timeout=bound(15)).items():
        for victim, fault in found:
            if rank == victim:
                assert fault is None, fault
            else:
                assert_has_left(job, fault, victim)
