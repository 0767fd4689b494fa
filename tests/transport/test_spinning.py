"""A rank spins while it waits for others only if each rank has a core; bound ranks count together."""

import os

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, beyond_gloo
from world import here

pytestmark = beyond_gloo("fastcoll's own waiting")

SPIN_US = 50
"""By default, where each rank has a core."""

many_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores: ranks of one core each"
)


def spin(cores_of_ranks, spin_us=-1):
    """Makes a group while this rank is bound to its cores, and returns what the group says of its waits."""
    import fastcoll
    import fastcoll.info

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of_ranks[here().rank])
    known = {group["name"] for group in fastcoll.info.groups()}
    try:
        group = dist.new_group(backend=BACKEND, pg_options=fastcoll.Options(spin_us=spin_us))
    finally:
        os.sched_setaffinity(0, before)
    assert "spin_us" not in told(known), "it is decided with the transport"
    dist.all_reduce(torch.ones(3), group=group)
    return told(known)["spin_us"]


def told(known):
    """Returns what fastcoll.info tells of the one group that is not known."""
    import fastcoll.info

    (new,) = [group for group in fastcoll.info.groups() if group["name"] not in known]
    return new


@many_cores
def test_ranks_bound_to_a_core_each_spin(world):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert world(2).run(spin, [{first}, {second}]) == [SPIN_US, SPIN_US]


@many_cores
def test_ranks_that_may_use_two_cores_spin(world):
    two = set(sorted(os.sched_getaffinity(0))[:2])
    assert world(2).run(spin, [two, two]) == [SPIN_US, SPIN_US]


def test_ranks_bound_to_one_core_do_not_spin(world):
    (core,) = sorted(os.sched_getaffinity(0))[:1]
    assert world(2).run(spin, [{core}, {core}]) == [0, 0]


@many_cores
def test_only_ranks_that_meet_on_a_core_count(world):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert world(3).run(spin, [{first}, {second}, {first}]) == [0, SPIN_US, 0]


@many_cores
def test_a_rank_between_two_others_joins_them(world):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert world(3).run(spin, [{first}, {first, second}, {second}]) == [0, 0, 0]


@many_cores
def test_a_core_is_counted_once(world):
    """Ranks 0 and 1 have one core, though the three of them, and with more cores all together, have as many."""
    cores = sorted(os.sched_getaffinity(0))
    sets = [{cores[0]}, {cores[0]}, set(cores)]
    assert world(3).run(spin, sets) == [0, 0, 0]


def test_the_option_decides(world):
    (core,) = sorted(os.sched_getaffinity(0))[:1]
    assert world(2).run(spin, [{core}, {core}], 7) == [7, 7]
