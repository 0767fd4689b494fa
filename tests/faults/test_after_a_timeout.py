"""After a timeout a second call, and the call of the late rank, raise at once, and return no stale data."""

import torch
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank, catch
from in_call import soon
from in_time import in_time
from over_hosts import over_hosts

ABSENT = 1


def too_late(rank: Rank):
    rank.used()
    soon(1.0)
    rank.tell("ready")
    tensor = torch.full((1000,), 5.0)
    if rank.rank == 0:
        rank.tell(catch(dist.all_reduce, tensor))
        rank.tell(catch(dist.all_reduce, torch.full((1000,), 6.0)))
    rank.hear()
    if rank.rank == ABSENT:
        rank.tell(catch(dist.all_reduce, tensor))
    dist.destroy_process_group()


@plays(17)
@over_hosts
def test_a_second_call_and_a_late_rank_get_the_error_at_once(jobs):
    job = jobs(2, too_late)
    job.hear_all()
    first, second = job.hear(0), job.hear(0)
    assert first is not None and "timed out" in first.text.lower() and first.seconds > 0.8, first
    job.tell(ABSENT)
    late = job.hear(ABSENT)
    for fault, within in ((first, 1.5), (second, 0.2), (late, 1.5)):
        assert fault is not None and "RuntimeError" in fault.bases, fault
        in_time(fault.seconds, within, fault.text)
    job.tell(0)
    job.hear_all()
    job.ended_well()
