"""Timeouts that works have, and extensions of them that end by themselves."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo, since, wait_all
from on_ranks import on_ranks
from words import await_word, say
from world import here

pytestmark = [
    since(14, "timeout of a work"),
    beyond_gloo("its works have none, and it takes no extension"),
    *on_ranks(2, fresh=True),
]

GROUP = timedelta(seconds=40)
MORE = timedelta(seconds=7)


def made(group):
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    return work, work.timeout


def test_of_works():
    """A work has the timeout of its group, or of its call; a later change is of later works."""
    group = dist.new_group([0, 1], timeout=GROUP)
    peer = 1 - dist.get_rank()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=11)
    tensor = torch.ones(3)
    works = [
        dist.all_reduce(tensor.clone(), group=group, async_op=True),
        group.allreduce([tensor.clone()], options),
        dist.isend(tensor, peer, group=group),
        dist.irecv(torch.empty(3), peer, group=group),
    ]
    group.set_timeout(timedelta(seconds=50))
    works.append(dist.barrier(group=group, async_op=True))
    wait_all(works)
    seconds = [work.timeout.total_seconds() for work in works]
    assert seconds == [40, 11, 40, 40, 50], seconds


def test_extension_ends_with_the_first_work():
    """It holds for all works until the first of them has ended."""
    group = dist.new_group([0, 1], timeout=GROUP)
    backend_of(group)._add_ephemeral_timeout(MORE)
    if dist.get_rank() == 1:
        await_word("all are made")
    first, extended = made(group)
    if dist.get_rank() == 0:
        assert extended == GROUP + MORE
        group._add_ephemeral_timeout(2 * MORE)  # of all backends of the group
        second, both = made(group)
        third, still = made(group)
        assert both == still == GROUP + 3 * MORE
        say("all are made")
    else:
        second, third = made(group)[0], made(group)[0]
    wait_all((first, second, third))
    assert made(group)[1] == GROUP
    dist.barrier(group=group)


def test_extension_of_synchronous_calls():
    """A call that makes no work is extended, and ends an extension; one that is refused does not."""
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    group.set_timeout(timedelta(milliseconds=50))
    if dist.get_rank() == 1:
        group.set_timeout(GROUP)
        await_word("refused")
        dist.all_reduce(torch.ones(1), group=group)
        await_word("failed")
        return
    group._add_ephemeral_timeout(MORE)
    with pytest.raises(ValueError, match="one tensor"):
        group.allreduce([torch.ones(1), torch.ones(1)])
    threading.Timer(0.3, (here().scratch / "refused").touch).start()
    dist.all_reduce(torch.ones(1), group=group)  # 50 ms were too few
    with pytest.raises(RuntimeError, match="after 50 ms"):
        dist.all_reduce(torch.ones(1), group=group)
    say("failed")
