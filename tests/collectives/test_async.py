"""Collectives of one tensor outstanding at once, and from many threads; tests/cpp/stress_*.cpp has the other orders."""

import random
import threading
from functools import partial

import torch
import torch.distributed as dist
from backend import beyond_gloo, wait_all
from collective_cases import MOVING, REDUCING, Case, Runner
from fault_list import plays
from on_ranks import on_ranks
from oracle import assert_same
from own_threads import in_threads


def issued(seed, group=None):
    """A random collective in flight, to be checked."""
    choose = random.Random(seed)
    case = Case(
        choose.choice([*REDUCING, *MOVING[:-1]]),
        choose.choice(["SUM", "AVG", "MAX"]),
        shape=(choose.choice([1, 3, 100, 5000, 70_001]),),
        root=choose.randrange(dist.get_world_size(group)),
        async_op=True,
        seed=seed,
    )
    return Runner(case, group)


@beyond_gloo("runs two collectives of one group at once")
@on_ranks(2)
def test_one_tensor_again_and_again():
    """Each collective reads what the one before it wrote: they must run in order."""
    tensor = torch.ones(30_000)
    wait_all([dist.all_reduce(tensor, async_op=True) for _ in range(20)])
    assert_same(tensor, torch.full((30_000,), float(dist.get_world_size()) ** 20))


@plays(30)
@on_ranks(3)
def test_threads_on_own_groups():
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone) for _ in range(4)]

    def work(which):
        for number in range(10):
            issued(1000 * which + number, groups[which]).check()
            tensor = torch.full((7,), float(which))
            dist.all_reduce(tensor, group=groups[which])
            assert_same(tensor, torch.full((7,), float(which * len(everyone))))

    order = random.Random(dist.get_rank()).sample(range(4), 4)
    assert in_threads(*(partial(work, which) for which in order)) == []


@on_ranks(2)
def test_threads_that_come_and_go():
    """Every collective is issued by a thread that has ended when it is waited for."""
    works = []
    for number in range(10):
        thread = threading.Thread(target=lambda number=number: works.append(issued(number)))
        thread.start()
        thread.join()
    for one in works:
        one.check()
