"""Faults of ranks that have created a group, and have not all come to its first collective."""

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import soon, tell_in_call
from suite_rules import bound

NOTICED = 1.0


def comes(rank: Rank, late: list[int]):
    rank.init()
    if rank.rank in late:
        rank.tell("ready")
        rank.hear()
    else:
        tell_in_call(rank)
    return catch(dist.all_reduce, torch.ones(10))


@pytest.mark.parametrize("hosts", [{}, {"FASTCOLL_TRANSPORT": "gloo"}], ids=["one", "three"])
def test_a_death_is_named_though_rank_0_has_not_come(jobs, hosts):
    """Rank 0 gathers who the ranks are; the others look at each other meanwhile."""
    job = jobs(3, comes, [0, 2], environment=hosts)
    job.hear_all()
    killed = job.kill(2)
    fault = job.hear(1)
    assert f"rank 2 (pid {job.pids[2]}, " in fault.text and "process died" in fault.text, fault
    assert fault.at - killed < bound(NOTICED)
    job.tell(0)
    fault = job.hear(0)
    assert f"rank 2 (pid {job.pids[2]}, " in fault.text and fault.seconds < bound(NOTICED), fault
    job.ended_well(but=[2])


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
    rank.init()
    tensor = torch.ones(10)
    fault = catch(dist.all_reduce, tensor)
    dist.destroy_process_group()
    return fault, tensor[0].item()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("hosts", [{}, {"FASTCOLL_TRANSPORT": "gloo"}], ids=["one", "two"])
def test_the_fault_of_an_earlier_life_is_not_this_one_s(jobs, first, hosts):
    job = jobs(2, two_lives, first, environment=hosts)
    assert "Timed out after 500 ms" in job.hear_all()[0].text
    job.tell(first)
    assert job.hear(first) == "in call"
    job.tell(1 - first)
    assert set(job.hear_all().values()) == {(None, 2.0)}
    job.ended_well()
