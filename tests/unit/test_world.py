"""The ``world`` fixture itself: what no other test would miss."""

import os
import signal
import time

import psutil
import pytest
import torch.distributed as dist
from ranks import RanksFailed
from suite_rules import bound
from world import Worlds, here, worlds_fixture


def rank_and_argument(word):
    return dist.get_rank(), dist.get_world_size(), word


def raise_on(rank):
    dist.barrier()
    if dist.get_rank() == rank:
        raise KeyError("lost")


def kill_on(rank):
    if here().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def sleep_on(rank):
    if here().rank == rank:
        time.sleep(1000)


def print_and(what):
    print(f"what it does: {what}", flush=True)
    if what == "raises":
        raise KeyError("lost")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)


def leave_marks():
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0])


def find_marks():
    return "LEFT_BEHIND" in os.environ, len(dist.distributed_c10d._world.pg_map)


def variables(*names):
    return [os.environ.get(name) for name in names]


def destroy_default_group():
    dist.destroy_process_group()


def test_nothing_of_a_call_is_left_for_the_next(world):
    world(2).run(leave_marks)
    assert world(2).run(find_marks) == [(False, 1), (False, 1)]


# Worlds that a test may break.
own_worlds = worlds_fixture("launcher", scope="function")


def test_exception_comes_back_with_rank_and_traceback(own_worlds):
    with pytest.raises(RanksFailed) as caught:
        own_worlds(2).run(raise_on, 1)
    text = str(caught.value)
    assert "rank 1" in text and "rank 0" not in text
    assert "KeyError: 'lost'" in text and "in raise_on" in text
    assert own_worlds(2).run(rank_and_argument, "again") == [(0, 2, "again"), (1, 2, "again")]


def test_death_is_reported_and_the_world_rebuilt(own_worlds):
    broken = own_worlds(2)
    pids = broken.pids.values()
    with pytest.raises(RanksFailed, match=r"rank 0\ndied: signal SIGKILL"):
        broken.run(kill_on, 0, init=False)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert own_worlds(2).run(rank_and_argument, 5) == [(0, 2, 5), (1, 2, 5)]


@pytest.mark.parametrize(("what", "whole"), [("raises", False), ("dies", True)])
def test_a_report_has_the_log_of_the_call_or_of_a_dead_rank_all(own_worlds, what, whole):
    own_worlds(1).run(print_and, "returns", init=False)
    with pytest.raises(RanksFailed) as caught:
        own_worlds(1).run(print_and, what, init=False)
    assert f"what it does: {what}" in str(caught.value)
    assert ("what it does: returns" in str(caught.value)) is whole


def test_death_that_was_planned_and_did_not_come(own_worlds):
    with pytest.raises(RanksFailed, match="was to die"):
        own_worlds(2).run(kill_on, 7, init=False, dying=[1])


def test_silent_rank_shows_its_stack(own_worlds):
    own_worlds(2).run(
        sleep_on, 2, init=False
    )  # starts the ranks, for which the deadline is too short
    deadline = bound(0.25)
    with pytest.raises(RanksFailed) as caught:
        own_worlds(2).run(sleep_on, 1, init=False, deadline=deadline)
    text = str(caught.value)
    assert f"---- rank 1\nno answer in time (deadline {deadline:g} s)" in text
    assert "in sleep_on" in text and "---- rank 0\n" not in text


def test_destroying_the_shared_group_is_an_error(own_worlds):
    with pytest.raises(RanksFailed, match="fresh=True"):
        own_worlds(1).run(destroy_default_group)


@pytest.mark.parametrize(
    "name", ["FASTCOLL_WAIT", pytest.param("OF_TORCH", marks=pytest.mark.full)]
)
def test_variables_of_ranks(launcher, tmp_path, name):
    """Those of fastcoll are set in a fork; others may be read when torch is imported."""
    worlds = Worlds(tmp_path, environ={name: "7"})
    try:
        assert worlds(1).run(variables, name, init=False) == [["7"]]
    finally:
        worlds.close()


def test_closing_leaves_no_process(launcher, tmp_path):
    worlds = Worlds(tmp_path)
    pids = worlds(3).pids.values()
    assert all(psutil.pid_exists(pid) for pid in pids)
    worlds(3).run(rank_and_argument, 0)
    worlds.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
