"""The ``world`` fixture itself, as far as no other test would miss it; tests/faults/test_jobs.py has the reports."""

import os
import signal

import psutil
import pytest
import torch.distributed as dist
from ranks import RanksFailed
from world import here, worlds_fixture


def rank_and_argument(word):
    return dist.get_rank(), dist.get_world_size(), word


def kill_on(rank):
    if here().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def leave_marks():
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0])


def find_marks():
    return "LEFT_BEHIND" in os.environ, len(dist.distributed_c10d._world.pg_map)


# Worlds that a test may break.
own_worlds = worlds_fixture("launcher", scope="function")


def test_nothing_of_a_call_is_left_for_the_next(own_worlds):
    own_worlds(2).run(leave_marks)
    assert own_worlds(2).run(find_marks) == [(False, 1), (False, 1)]
    with pytest.raises(RanksFailed, match="fresh=True"):
        own_worlds(2).run(dist.destroy_process_group)


def test_death_is_reported_and_the_world_rebuilt(own_worlds):
    broken = own_worlds(2)
    pids = broken.pids.values()
    with pytest.raises(RanksFailed, match=r"rank 0\ndied: signal SIGKILL"):
        broken.run(kill_on, 0, init=False)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert own_worlds(2).run(rank_and_argument, 5) == [(0, 2, 5), (1, 2, 5)]


def test_death_that_was_planned_and_did_not_come(own_worlds):
    with pytest.raises(RanksFailed, match="was to die"):
        own_worlds(2).run(kill_on, 7, init=False, dying=[1])
