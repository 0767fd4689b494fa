"""Groups that share NCCL's resources (``split_share``), as a program makes and loses them."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from device_ranks import called, fault_of, inject, stand_in
from on_ranks import on_ranks
from own_threads import in_threads
from suite_rules import bound

import fastcoll
from fastcoll import info

pytestmark = on_ranks(2, world="nccl_world", fresh=True)

DEVICE = "recording:0"


def sharing(seconds=60):
    """A group that shares with others like it, after its first call."""
    options = fastcoll.Options()
    options.config.split_share = 1
    own = dist.new_group(timeout=timedelta(seconds=60), pg_options=options)
    reduce(own)
    own._get_backend(torch.device(DEVICE)).set_timeout(timedelta(seconds=seconds))
    return own


def reduce(own):
    dist.all_reduce(x := torch.ones(3, device=DEVICE), group=own)
    assert x.tolist() == [dist.get_world_size()] * 3


def test_they_have_one_communicator_and_its_parts():
    stand_in().fakeNcclClearCalls()
    groups = [sharing() for _ in range(4)]
    assert (called("initRank"), called("splitInit")) == (1, 3)
    for own in reversed(groups):
        reduce(own)
    told = {each["name"]: each for each in info.groups()}
    names = [own.group_name for own in groups]
    for name in names:
        assert told[name]["communicators"] == [{"name": "of recording:0", "bytes": 515 << 20}]
        assert told[name]["shares_with"] == sorted(set(names) - {name})
    for ends, stays in ((0, 3), (3, 1)):  # that of ncclCommInitRank, and one that was split off
        dist.destroy_process_group(groups[ends])
        reduce(groups[stays])


def test_threads_that_keep_one_order_may_call_two():
    groups, turns = [sharing(), sharing()], [threading.Event() for _ in range(41)]
    turns[0].set()

    def call(which):
        for turn in range(which, 40, 2):
            turns[turn].wait(30)
            reduce(groups[which])
            turns[turn + 1].set()

    assert in_threads(partial(call, 0), partial(call, 1)) == []
    assert turns[40].is_set()


def test_another_order_ends_with_an_error():
    """NCCL has one order of all calls of a family, so this hangs until the timeout."""
    groups = [sharing(1), sharing(1)]
    for own in groups if dist.get_rank() == 0 else reversed(groups):
        text, took = fault_of(lambda own=own: reduce(own))
        assert took < bound(10)
        assert "timed out after 1000 ms" in text or "share resources" in text, text


@pytest.mark.parametrize("lost", [0, 1])
def test_a_group_that_is_aborted_fails_the_others(lost):
    groups = [sharing(), sharing()]
    if dist.get_rank() == 0:
        groups[lost].abort()
    text, took = fault_of(lambda: reduce(groups[1 - lost]))
    assert f"group '{groups[lost].group_name}', whose communicators share resources" in text
    assert took < bound(5)
    fault_of(lambda: reduce(groups[lost]))


def test_a_split_that_fails_fails_the_group_that_is_split():
    first = sharing()
    if dist.get_rank() == 0:
        inject("fail splitInit 3 0 1")
    text, _ = fault_of(sharing)
    assert dist.get_rank() != 0 or "injected into splitInit" in text
    text, _ = fault_of(lambda: reduce(first))
    assert "could not split a communicator of this group's family" in text
