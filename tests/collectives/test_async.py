"""Many collectives outstanding at once, on one group, on many, and from many threads."""

import random
import threading

import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import MOVING, REDUCING, Case, Runner
from fault_list import plays
from on_ranks import on_ranks
from oracle import assert_same


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


@on_ranks(1, 2, 3, 5)
def test_outstanding():
    """Wait in another order on every rank."""
    works = [issued(1000 * dist.get_world_size() + number) for number in range(40)]
    random.Random(dist.get_rank()).shuffle(works)
    for one in works:
        one.check()


@beyond_gloo("runs two collectives of one group at once")
@on_ranks(2)
def test_one_tensor_again_and_again():
    """Each collective reads what the one before it wrote: they must run in order."""
    tensor = torch.ones(30_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
    assert_same(tensor, torch.full((30_000,), float(dist.get_world_size()) ** 20))


@on_ranks(3)
def test_groups_in_opposite_orders():
    """Even ranks issue on the first group first, odd ranks on the second."""
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone) for _ in range(2)]
    for number in range(10):
        order = [0, 1] if dist.get_rank() % 2 == 0 else [1, 0]
        for one in [issued(10 * number + which, groups[which]) for which in order]:
            one.check()


@plays(30)
@on_ranks(3)
def test_threads_on_own_groups():
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone) for _ in range(4)]
    failures = []

    def work(which):
        try:
            for number in range(10):
                issued(1000 * which + number, groups[which]).check()
                tensor = torch.full((7,), float(which))
                dist.all_reduce(tensor, group=groups[which])
                assert_same(tensor, torch.full((7,), float(which * len(everyone))))
        except BaseException as failure:
            failures.append(failure)

    running = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    random.Random(dist.get_rank()).shuffle(running)
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]


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
