"""Groups: overlapping, split and merged; tests/faults/test_many.py has many."""

import contextlib
import copy
import inspect
import math
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, TORCH, backend_of, beyond_gloo, since
from on_ranks import on_ranks
from oracle import assert_same
from own_threads import thread_names
from suite_rules import until
from words import await_word, say
from world import Worlds, here, init_group


def sum_over(group, members):
    """All-reduce each rank's number over the group and check it."""
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    assert_same(tensor, torch.full((3,), float(sum(members))))


@on_ranks(4, fresh=True)
def test_overlapping():
    rank = dist.get_rank()
    teams = [[0, 1], [1, 2], [2, 3], [0, 3], [0, 1, 2], [1, 2, 3], [3], [0, 1, 2, 3]]
    groups = [(members, dist.new_group(members)) for members in teams]
    for members, group in [*groups, *reversed(groups)]:
        if rank in members:
            assert group.rank() == members.index(rank) and group.size() == len(members)
            sum_over(group, members)
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER


@on_ranks(3, fresh=True)
def test_local_synchronization():
    members = [0, 2]
    if dist.get_rank() in members:
        group = dist.new_group(members, use_local_synchronization=True)
        sum_over(group, members)


IDLE = 2.0
"""Seconds after which an unused thread of the pool ends by itself."""


def pool_threads():
    return thread_names().count("fastcoll-work")


def destroyed_after_a_pooled_thread():
    init_group()
    everyone = list(range(here().size))
    began = time.monotonic()  # before the last work, so no unused thread ends within IDLE seconds
    work = dist.all_reduce(torch.ones(3), async_op=True)
    until(work.is_completed)  # without wait(), a pooled thread runs it
    sum_over(dist.new_group(everyone), everyone)
    if pool_threads() == 0:
        return math.inf  # so slow that the thread has ended, unused: this try tells nothing
    dist.destroy_process_group()
    until(lambda: pool_threads() == 0)
    return time.monotonic() - began


@beyond_gloo("its device types are others")
@on_ranks(4, fresh=True)
def test_merged():
    """Groups that know nothing of each other meet through a store, and number their ranks as they come."""
    import fastcoll

    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [
        dist.new_group(
            [r for r in range(size) if r % 2 == half], pg_options=fastcoll.Options(spin_us=0)
        )
        for half in (0, 1)
    ]
    mine = halves[rank % 2]
    store = dist.FileStore(str(here().scratch / "merge"), size)
    before = backend_of(mine).options.group_name
    group = mine.merge_remote_group(
        store, size, timedelta(seconds=30), group_name="merged", group_desc="both halves"
    )
    assert group.size() == size and group.group_desc == "both halves"
    assert backend_of(group) is group._get_backend(torch.device("cuda"))
    made = backend_of(group).options
    assert (made._timeout, made.group_name, made.spin_us) == (timedelta(seconds=30), "merged", 0)
    ranks = torch.full((size,), -1)
    ranks[group.rank()] = rank
    group.allreduce([ranks], dist.ReduceOp.MAX).wait()
    assert sorted(ranks.tolist()) == list(range(size))
    assert backend_of(mine).options.group_name == before
    members = [r for r in range(size) if r % 2 == rank % 2]
    sum_over(mine, members)
    again = mine.merge_remote_group(
        dist.PrefixStore("again", store), size, timedelta(seconds=30), group_name="merged"
    )
    assert backend_of(again) is not backend_of(group)
    again.barrier().wait()


@on_ranks(2, fresh=True)
def test_set_timeout():
    """The new timeout holds for later collectives."""
    dist.group.WORLD.set_timeout(timedelta(milliseconds=300))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)tim"):
            dist.all_reduce(torch.ones(1))
        say("done")
    else:
        await_word("done")


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason=f"torch {TORCH[0]}.{TORCH[1]} has no way to keep the order of a group's ranks",
)
@on_ranks(3, fresh=True)
def test_permuted_ranks():
    members = [2, 0, 1]
    group = dist.new_group(members, sort_ranks=False)
    assert group.rank() == members.index(dist.get_rank())
    gathered = [torch.empty(1) for _ in members]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group=group)
    assert [int(t) for t in gathered] == members


@beyond_gloo("it has no pool")
def test_the_last_group_leaves_no_thread_of_the_pool(tmp_path):
    # In new processes, where no group of an earlier test lives on.
    with contextlib.closing(Worlds(tmp_path)) as worlds:
        # A busy machine may be slow once; unused threads take longer than this each time.
        tries = (
            max(worlds(2).run(destroyed_after_a_pooled_thread, init=False)) < IDLE for _ in range(6)
        )
        assert any(tries)


@beyond_gloo("its options do not copy, and it crashes without them")
@on_ranks(4, fresh=True)
def test_split():
    parent = dist.group.WORLD
    backend = backend_of()
    assert backend.supports_splitting
    members = [0, 2] if dist.get_rank() in (0, 2) else [1, 3]
    options = copy.deepcopy(backend.options)  # as dist.split_group does
    child = parent.split_group(
        members, timeout=timedelta(seconds=30), opts=options, group_name=f"half{members[0]}"
    )
    assert child.size() == 2 and child.rank() == members.index(dist.get_rank())
    assert backend.name() == backend_of(child).name() == BACKEND
    tensor = torch.tensor([float(dist.get_rank())])
    child.allreduce([tensor]).wait()
    assert tensor.item() == sum(members)
    backend_of(child)._set_sequence_number_for_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


@beyond_gloo("it crashes without options")
@pytest.mark.parametrize(
    "user",
    [
        pytest.param("own", marks=since(14, "copy of the options that a split is given")),
        "of gloo",  # as a script for NCCL does, with FASTCOLL_REPLACE=nccl
        "none",
    ],
)
@on_ranks(2, fresh=True)
def test_split_leaves_options(user):
    """What a split is given, and what its parent has, is the same afterwards; the child's are its own."""
    import fastcoll

    options = fastcoll.Options(timeout=timedelta(seconds=23), ring_bytes=1 << 20)
    parent = dist.new_group([0, 1], pg_options=options)
    name = backend_of(parent).options.group_name
    given = copy.copy(options) if user == "own" else None
    if user == "of gloo":
        given = dist.ProcessGroupGloo._Options()
    child = parent.split_group(
        [0, 1], timeout=timedelta(seconds=7), opts=given, group_name=f"split, {user}"
    )
    log = Path("/proc/self/fd/2").read_text()  # a rank's stderr is a file
    told = f"group 'split, {user}' is split off without its options of backend 'gloo'"
    assert log.count(told) == (user == "of gloo")
    for kept in [backend_of(parent).options, *([given] if user == "own" else [])]:
        assert kept._timeout == timedelta(seconds=23)
        assert kept.group_name == ("" if kept is given else name)
    made = backend_of(child).options
    assert (made._timeout, made.ring_bytes) == (timedelta(seconds=7), 1 << 20)
    assert made.group_name == f"split, {user}"
    for group in (parent, child):
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        assert tensor.item() == 2
