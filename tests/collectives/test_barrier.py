"""barrier and monitored_barrier."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from suite_rules import bound
from words import await_word, say
from world import here


def cpu_backend(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def nobody_passes_early(rounds):
    folder, size = here().scratch, dist.get_world_size()
    for number in range(rounds):
        if dist.get_rank() == number % size:
            time.sleep(0.02)
        (folder / f"{number}-{dist.get_rank()}").touch()
        dist.barrier()
        assert len(list(folder.glob(f"{number}-*"))) == size


def asynchronously():
    if dist.get_rank() == 1:
        await_word("looked")
    work = dist.barrier(async_op=True)
    early = work.is_completed()
    say("looked")
    assert work.wait()
    return early


def in_own_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [(members, dist.new_group(members)) for members in ([0, 1], [1, 2], [0, 2], [2])]
    for members, group in groups:
        if rank in members:
            dist.barrier(group=group)
            assert group.size() == len(members) <= size


def naming_a_device():
    """As launchers of GPU jobs do; without a device it means nothing."""
    dist.barrier(device_ids=[0])
    dist.barrier(device_ids=[0], async_op=True).wait()


def monitored_passes():
    for wait_all in (False, True):
        cpu_backend().monitored_barrier(timedelta(seconds=20), wait_all)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


def monitored_names_the_missing(missing, wait_all):
    dist.barrier()
    if dist.get_rank() in missing:
        for rank in set(range(dist.get_world_size())) - set(missing):
            await_word(f"rank {rank} is through")
        return ""
    with pytest.raises(RuntimeError) as caught:
        cpu_backend().monitored_barrier(timedelta(seconds=bound(0.2)), wait_all)
    say(f"rank {dist.get_rank()} is through")
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nobody_passes_early(world, size):
    world(size).run(nobody_passes_early, 2 * size)


def test_asynchronous(world):
    assert world(2).run(asynchronously)[0] is False


def test_groups(world):
    world(3).run(in_own_groups)


def test_a_device_is_named_where_there_is_none(world):
    world(2).run(naming_a_device)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_monitored_barrier_passes(world, size):
    world(size).run(monitored_passes)


def test_monitored_barrier_names_one_missing_rank(world):
    text = world(3).run(monitored_names_the_missing, [2], False, fresh=True)[0]
    assert "2" in text and ("timed out" in text.lower() or "failed" in text.lower()), text


def test_monitored_barrier_names_all_missing_ranks(world):
    text = world(4).run(monitored_names_the_missing, [1, 3], True, fresh=True)[0]
    assert "1" in text and "3" in text, text
