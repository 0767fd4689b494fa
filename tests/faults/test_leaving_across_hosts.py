"""A rank that leaves a group of several hosts is named as one that has left, whatever its peers notice first."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from suite_rules import bound


def start(rank: Rank, hosts: str, name: str = "first") -> None:
    os.environ["FASTCOLL_HOST_ID"] = hosts[rank.rank]
    rank.used(name)


def assert_has_left(fault, victim: int) -> None:
    assert fault is not None and fault.kind == "DistBackendError", fault
    assert f"rank {victim} (pid " in fault.text, fault.text
    assert "left the group (goodbye sent)" in fault.text, fault.text
    assert fault.seconds < bound(1.5), fault


def calls_after_an_end(rank: Rank, victim: int):
    start(rank, "0011")
    rank.meet()
    if rank.rank == victim:
        return dist.destroy_process_group()
    rank.hear()
    return catch(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["leader0", "other0", "leader1", "other1"])
def test_the_end_of_a_process_that_left_is_no_death(jobs, victim):
    job = jobs(4, calls_after_an_end, victim)
    assert job.hear(victim) is None and job.end(victim) == 0
    others = [rank for rank in range(4) if rank != victim]
    for rank in others:
        job.tell(rank)
    for rank in others:
        assert_has_left(job.hear(rank), victim)
    job.ended_well()


def leaves_amid_calls(rank: Rank, hosts: str, count: int, rounds: int):
    """Each round another rank leaves in the middle of the others' collectives."""
    found = []
    for round_ in range(rounds):
        victim = round_ % rank.size
        start(rank, hosts, f"round{round_}")
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
@pytest.mark.parametrize(
    "count",
    [
        30_000,
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(3_000_000, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_leaves_amid_calls(jobs, hosts, count, rounds):
    job = jobs(len(hosts), leaves_amid_calls, hosts, count, rounds)
    for rank, found in job.hear_all(timeout=bound(15)).items():
        for victim, fault in found:
            if rank == victim:
                assert fault is None, fault
            else:
                assert_has_left(fault, victim)
    job.ended_well()
