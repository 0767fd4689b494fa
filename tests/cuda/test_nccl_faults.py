"""What goes wrong in NCCL is an error that says what, where and what to do; and an abort frees who hangs."""

import os
import threading
import time
import unittest.mock
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import Tensors, communicator, create, on_stand_in, stand_in
from own_threads import in_threads
from suite_rules import bound
from world import here

from fastcoll.cuda.nccl import NcclCommunicator

pytestmark = on_stand_in(1)


def test_every_status_is_told_with_its_remedy():
    remedies = set()
    with communicator() as made:
        call, tensor, result = Tensors(made), torch.ones(4), torch.zeros(4)
        for status in (1, 2, 3, 4, 5, 6, 8):
            stand_in.inject("fail", "allReduce", status)
            with pytest.raises(dist.DistBackendError) as caught:
                call.all_reduce(tensor, result)
            text = str(caught.value)
            assert text.startswith("NCCL 2.29.7 reports ")
            told = f"(status {status}): injected into allReduce. "
            assert told in text and text.endswith(".")
            remedies.add(text.partition(told)[2])
        call.all_reduce(tensor, result)
        assert result.tolist() == [1.0] * 4
    assert len(remedies) == 7


def test_every_call_raises():
    """The engine puts its name before the text."""
    with communicator() as made:
        call, tensor, result = Tensors(made), torch.ones(4), torch.zeros(4)
        calls = {
            "allReduce": lambda: call.all_reduce(tensor, result),
            "reduce": lambda: call.issue("reduce", tensor, result, 0, "SUM"),
            "broadcast": lambda: call.issue("broadcast", tensor, result, 0),
            "allGather": lambda: call.issue("all_gather", tensor, result),
            "reduceScatter": lambda: call.issue("reduce_scatter", tensor, result, op="SUM"),
            "send": lambda: call.issue("send", tensor, tensor[:0], 0),
            "recv": lambda: call.issue("recv", tensor[:0], tensor, 0),
            "split": lambda: made.split(0, 0, "part"),
        }
        for name, function in calls.items():
            head = r"fastcoll.nccl_split \[group 'g', rank 0/1\]: " if name == "split" else ""
            stand_in.inject("fail", name, 2)
            with pytest.raises(
                dist.DistBackendError, match=rf"^{head}NCCL 2.29.7 .*injected into {name}"
            ):
                function()


@on_stand_in(2)
def test_calls_in_progress():
    """Calls that NCCL goes on with are waited for, and not for ever."""
    stand_in.inject("in_progress", "initRank", 5)
    made = create(timeout=1)
    call, tensor = Tensors(made), torch.ones(4)
    stand_in.inject("in_progress", "allReduce", 3)
    call.all_reduce(tensor, tensor)
    call.all_reduce(tensor, tensor)
    assert tensor.tolist() == [here().size ** 2] * 4
    stand_in.inject("in_progress", "allReduce", 10**9)
    with pytest.raises(dist.DistBackendError, match=r"^timed out after 1000 ms"):
        call.all_reduce(tensor, tensor)
    made.abort()


@on_stand_in(3)
def test_split_in_progress():
    """Where communicators do not block, a split goes on when its call has returned."""
    tensor = torch.ones(4)
    no_blocking = unittest.mock.patch.dict(os.environ, {"NCCL_COMM_BLOCKING": "0"})
    with no_blocking, communicator() as made:
        for polls in (5, 6):  # the call says that it goes on, or nothing of it
            stand_in.inject("in_progress", "split", polls)
            part = made.split(here().rank % 2, 0, "part")
            assert part is not None and part.member.size == (here().size + 1 - here().rank % 2) // 2
            Tensors(part).all_reduce(tensor.fill_(1), tensor)
            assert tensor.tolist() == [part.member.size] * 4
            stand_in.inject("in_progress", "split", polls)
            some = made.split(-1 if here().rank == 0 else 0, 0, "some")
            assert (some is None) == (here().rank == 0)
            for each in (part, some):
                assert each is None or each.destroy()


def test_split_for_good():
    made = create(timeout=1)
    with unittest.mock.patch.dict(os.environ, {"NCCL_COMM_BLOCKING": "0"}):
        stand_in.inject("in_progress", "split", 10**9)
        with pytest.raises(
            dist.DistBackendError,
            match=r"nccl_split .*timed out after 1000 ms: NCCL is still running",
        ):
            made.split(0, 0, "part")
    made.abort()


def freed(made: NcclCommunicator, name: str, hang: Callable[[], None]) -> None:
    """Hangs on this thread in a call, is aborted from another, and raises then."""
    results: list[bool] = []

    def abort() -> None:
        stand_in.wait_for(name)
        results.append(made.abort("somebody said so"))

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(dist.DistBackendError, match=r"^the group was aborted"):
        hang()
    thread.join(20)
    assert results == [True] and made.closed == "somebody said so"


@pytest.mark.parametrize("name", ["absent", "unmatched", "broadcast", "in progress"])
@on_stand_in(2)
def test_an_abort_frees_the_thread_that_hangs_in_a_call(name):
    tensor = torch.ones(4)
    made = create()
    call = Tensors(made)

    if name == "absent":  # only this rank calls
        if here().rank == 0:
            freed(made, "allReduce", lambda: call.all_reduce(tensor, tensor))
        else:
            made.abort()
    elif name == "in progress":
        stand_in.inject("in_progress", "broadcast", 10**9)
        freed(made, "broadcast", lambda: call.issue("broadcast", tensor, tensor, 0))
    elif name == "unmatched":
        if here().rank == 0:
            freed(made, "recv", lambda: call.issue("recv", tensor[:0], tensor, 1))
        else:
            made.abort()
    else:
        stand_in.inject("hang", name)
        freed(made, name, lambda: call.issue("broadcast", tensor, tensor, 0))


@on_stand_in(2)
def test_split_hangs():
    """A rank that does not split: the others give up."""
    made = create(timeout=1)
    if here().rank == 0:
        with pytest.raises(
            dist.DistBackendError, match=r"nccl_split .*timed out after 1000 ms: not all"
        ):
            made.split(0, 0, "part")
    made.abort()


def check_unusable(made: NcclCommunicator, text: str) -> None:
    tensor = torch.ones(1)
    with pytest.raises(dist.DistBackendError, match=r"^the group was aborted"):
        Tensors(made).all_reduce(tensor, tensor)
    for use in (lambda: made.split(0, 0, "part"), lambda: made.register(tensor.data_ptr(), 4)):
        with pytest.raises(dist.DistBackendError, match=text):
            use()


def test_ends():
    """Every end may come again, from any thread, and NCCL hears of one."""
    for first in ("destroy", "abort"):
        stand_in.clear()
        made = create(name=first)
        assert made.closed is None
        assert getattr(made, first)()
        assert in_threads(*(made.abort, made.destroy) * 4) == []
        names = stand_in.names()
        assert names.count("abort") + names.count("destroy") == 1 and first in names
        text = "was destroyed" if first == "destroy" else "was aborted"
        check_unusable(made, text)


def test_ends_that_hang_are_left_behind():
    """They are left behind; NCCL is not asked again."""
    for name in ("destroy", "abort"):
        stand_in.clear()
        made = create(name=name)
        stand_in.inject("hang", name)
        start = time.monotonic()
        assert not getattr(made, name)(seconds=0.3)
        assert 0.3 <= time.monotonic() - start < bound(5)
        assert not made.abort(seconds=0.1)
        names = stand_in.names()
        assert names.count("abort") + names.count("destroy") == 1 and name in names
    stand_in.clear()
