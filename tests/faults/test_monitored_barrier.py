"""The monitored barrier names the rank that is missing, and the group stays usable."""

from datetime import timedelta

import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import tell_in_call
from suite_rules import bound

TIMEOUT = 0.5
LATE = 0.5
ABSENT = 1


def monitored(rank: Rank):
    rank.used()
    if rank.rank == 2:
        tell_in_call(rank)
    else:
        rank.pause()
    if rank.rank != ABSENT:
        # torch.distributed.monitored_barrier itself refuses every name but "gloo".
        group = dist.group.WORLD
        fault = catch(group.monitored_barrier, timedelta(seconds=TIMEOUT), wait_all_ranks=True)
        rank.tell(fault)
        rank.hear()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_monitored_barrier_names_the_rank_and_spares_the_group(jobs):
    job = jobs(3, monitored)
    job.hear_all()
    job.tell(0)
    faults = job.hear_all(but=[ABSENT])
    assert f"Rank {ABSENT} failed to pass monitoredBarrier" in faults[0].text
    assert faults[2] is not None and faults[2].seconds < TIMEOUT + bound(LATE)
    job.tell_all()
    assert job.hear_all() == {rank: [3.0, 3.0] for rank in range(3)}
