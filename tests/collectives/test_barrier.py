"""barrier and monitored_barrier."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, backend_of
from on_ranks import on_ranks
from suite_rules import bound
from words import await_word, say
from world import here


@on_ranks(1, 2, 3, 5)
def test_nobody_passes_early():
    folder, size = here().scratch, dist.get_world_size()
    for number in range(2 * size):
        if dist.get_rank() == number % size:
            time.sleep(0.02)
        (folder / f"{number}-{dist.get_rank()}").touch()
        dist.barrier()
        assert len(list(folder.glob(f"{number}-*"))) == size


@on_ranks(2)
def test_asynchronous():
    if dist.get_rank() == 1:
        await_word("looked")
    work = dist.barrier(async_op=True)
    assert dist.get_rank() == 1 or not work.is_completed()
    say("looked")
    assert work.wait()


@on_ranks(2)
def test_a_device_is_named_where_there_is_none():
    """As launchers of GPU jobs do; without a device it means nothing."""
    dist.barrier(device_ids=[0])
    dist.barrier(device_ids=[0], async_op=True).wait()


@on_ranks(1, 2, 4)
def test_monitored_barrier_passes():
    for wait_all in (False, True):
        backend_of().monitored_barrier(timedelta(seconds=20), wait_all)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


@pytest.mark.parametrize(
    ("size", "missing", "wait_all"), [(3, [2], False), (4, [1, 3], True)], ids=["one", "all"]
)
@on_ranks(fresh=True)
def test_monitored_barrier_names_missing_ranks(missing, wait_all):
    """The group stays usable, unlike one of gloo."""
    # torch.distributed.monitored_barrier itself refuses every name but "gloo".
    group, timeout = dist.group.WORLD, bound(0.2)
    group.barrier().wait()
    if dist.get_rank() in missing:
        for rank in set(range(group.size())) - set(missing):
            await_word(f"rank {rank} is through")
    else:
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            group.monitored_barrier(timedelta(seconds=timeout), wait_all_ranks=wait_all)
        assert time.monotonic() - start < timeout + bound(0.5)
        say(f"rank {dist.get_rank()} is through")
        if dist.get_rank() == 0:
            named = ", ".join(map(str, missing))
            assert re.search(rf"Ranks? {named} failed to pass monitoredBarrier", str(caught.value))
    if not IS_GLOO:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [group.size()] * 2
