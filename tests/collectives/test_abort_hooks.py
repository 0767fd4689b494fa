"""Abort hooks: called once, when a group fails and before its works do."""

import contextlib
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo, since
from on_ranks import on_ranks
from suite_rules import bound, until
from words import await_word, say

pytestmark = [since(14, "abort hooks"), beyond_gloo("it calls none"), *on_ranks(2, fresh=True)]


def used_group(seconds=60):
    """A group of its own whose ranks have met; from here on its calls take so many seconds at most."""
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()  # of another group: no rank is in that call any more
    group.set_timeout(timedelta(seconds=seconds))
    return group


def collective(group):
    return dist.all_reduce(torch.ones(5), group=group, async_op=True)


def receive(group):
    return dist.irecv(torch.ones(5), group_src=1, group=group)


def test_synchronous():
    """The caller gets its error when the hook has ended."""
    group = used_group(0.3 if dist.get_rank() == 0 else 60)
    if dist.get_rank() == 1:
        await_word("failed")
        return
    seen = []
    group.register_abort_hook(1, lambda: (time.sleep(0.2), seen.append("ended")))
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        dist.all_reduce(torch.ones(1), group=group)
    assert seen == ["ended"]
    say("failed")


@on_ranks(3, fresh=True)
def test_of_all_ranks():
    """One rank aborts. The hook of a rank that waits is called, and that of one whose next call is refused."""
    rank, group, seen = dist.get_rank(), used_group(), []
    group.register_abort_hook(1, lambda: seen.append(rank))
    work = None
    if rank == 0:
        await_word("waits")
        group.abort()
        say("aborted")
    elif rank == 1:
        work = collective(group)
        say("waits")
    else:
        await_word("aborted")
    with pytest.raises(RuntimeError, match="rank 0 aborted the group"):
        work.wait() if work else dist.all_reduce(torch.ones(1), group=group)
    assert seen == [rank]
    group.abort()
    assert seen == [rank]


def test_several():
    """In the order of their numbers; one that raises keeps no other from being called, and changes no error."""
    group, seen = used_group(), []

    def raises():
        seen.append("raises")
        raise KeyError("of the hook")

    group.register_abort_hook(3, lambda: seen.append("last"))
    group.register_abort_hook(1, lambda: seen.append("replaced"))
    group.register_abort_hook(1, raises)
    group.register_abort_hook(2, lambda: seen.append("taken back"))
    group.unregister_abort_hook(2)
    group.unregister_abort_hook(9)  # there is none
    group.abort()
    assert seen == ["raises", "last"]
    with pytest.raises(RuntimeError, match="aborted the group") as caught:
        dist.all_reduce(torch.ones(1), group=group)
    assert "of the hook" not in str(caught.value)


def test_no_lock_is_held():
    """No lock is held: a hook, and a thread that it waits for, may ask the group for anything."""
    group, seen = used_group(), []

    def ask():
        backend = backend_of(group)
        seen.append(backend._get_sequence_number_for_group())
        backend.get_error()
        group.unregister_abort_hook(1)
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            seen.append(str(error))

    def hook():
        ask()
        thread = threading.Thread(target=backend_of(group)._get_sequence_number_for_group)
        thread.start()
        thread.join(bound(5))
        seen.append(thread.is_alive())

    group.register_abort_hook(1, hook)
    group.set_timeout(timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        receive(group)
        until(lambda: len(seen) == 3)
        assert seen[0] == 1 and "imed out" in seen[1] and seen[2] is False, seen
        say("failed")
    else:
        await_word("failed")


def test_healthy():
    """A group that ends in order calls none."""
    group, seen = used_group(), []
    group.register_abort_hook(1, lambda: seen.append(1))
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="destroyed"):
        backend_of(group).allreduce([torch.ones(1)])
    assert seen == []


def test_not_kept():
    """A hook that holds its group does not keep it alive, be the group destroyed or aborted."""
    import fastcoll.info

    dist.barrier()
    before = len(fastcoll.info.groups())
    for end in (dist.destroy_process_group, lambda group: group.abort()):
        group = dist.new_group(list(range(dist.get_world_size())))
        group.register_abort_hook(1, lambda group=group: group.size())
        end(group)
        with contextlib.suppress(ValueError):  # it is destroyed already
            dist.destroy_process_group(group)
        del group
    gc.collect()
    assert len(fastcoll.info.groups()) == before


@pytest.mark.parametrize("nobody_waits", [True, False])
@pytest.mark.parametrize("call", [collective, receive])
def test_time_is_up(call, nobody_waits):
    """Rank 1 never calls. The hook sees a work that has not failed, although it takes a while."""
    group = used_group(0.3 if dist.get_rank() == 0 else 60)
    if dist.get_rank() == 1:
        await_word("failed")
        return
    seen, held = [], []

    def hook():
        time.sleep(0.2)
        seen.append(held[0].is_completed() if nobody_waits else None)

    group.register_abort_hook(7, hook)
    held.append(call(group))
    if nobody_waits:
        until(lambda: seen)
        assert seen == [False]
        until(held[0].is_completed)  # polled: this thread has Python's lock
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        held[0].wait()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        dist.all_reduce(torch.ones(1), group=group)
    assert len(seen) == 1
    say("failed")
