"""What goes wrong in NCCL is an error that says what, where and what to do; and an abort frees who hangs."""

import os
import threading
import time
import unittest.mock
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import StandIn, Tensors, communicator, create
from suite_rules import bound
from world import Worlds
from world_rank import here

from fastcoll.cuda.nccl import NcclCommunicator


def every_status(path: str) -> list[str]:
    stand_in, texts = StandIn.load(path), []
    with communicator(path) as made:
        call, tensor = Tensors(made), torch.ones(4)
        for status in (1, 2, 3, 4, 5, 6, 8):
            stand_in.inject("fail", "allReduce", status)
            with pytest.raises(dist.DistBackendError) as caught:
                call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
            texts.append(str(caught.value))
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
        assert tensor.tolist() == [1.0] * 4
    return texts


def every_call(path: str) -> None:
    stand_in = StandIn.load(path)
    with communicator(path) as made:
        call, tensor = Tensors(made), torch.ones(4)
        calls = {
            "allReduce": ("all_reduce", lambda: call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)),
            "reduce": ("reduce", lambda: call.reduce(tensor, tensor, dist.ReduceOp.SUM, 0)),
            "broadcast": ("broadcast", lambda: call.broadcast(tensor, tensor, 0)),
            "allGather": ("all_gather", lambda: call.all_gather(tensor, tensor)),
            "reduceScatter": (
                "reduce_scatter",
                lambda: call.reduce_scatter(tensor, tensor, dist.ReduceOp.SUM),
            ),
            "send": ("send", lambda: call.send(tensor, 0)),
            "recv": ("recv", lambda: call.receive(tensor, 0)),
            "split": ("nccl_split", lambda: made.split(0, 0, "part")),
        }
        for name, (what, function) in calls.items():
            stand_in.inject("fail", name, 2)
            with pytest.raises(
                dist.DistBackendError,
                match=rf"^fastcoll.{what} \[group 'g', rank 0/1\]: NCCL 2.29.7",
            ):
                function()
        for name in ("groupStart", "groupEnd"):
            stand_in.inject("fail", name, 3)
            with (
                pytest.raises(dist.DistBackendError, match=r"fastcoll.group .*status 3\)"),
                made.group(),
            ):
                calls["allReduce"][1]()


def in_progress(path: str) -> None:
    """Calls that NCCL goes on with are waited for, and not for ever."""
    stand_in = StandIn.load(path)
    stand_in.clear()
    stand_in.inject("in_progress", "initRank", 5)
    made = create(path, timeout=1)
    call, tensor = Tensors(made), torch.ones(4)
    stand_in.inject("in_progress", "allReduce", 3)
    call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    assert made.async_error() is None
    stand_in.inject("in_progress", "groupEnd", 3)
    with made.group():
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    assert tensor.tolist() == [here().size ** 3] * 4
    stand_in.inject("in_progress", "allReduce", 10**9)
    with pytest.raises(dist.DistBackendError, match=r"all_reduce .*timed out after 1000 ms"):
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    assert made.async_error() is None
    made.abort()
    stand_in.clear()


def split_in_progress(path: str) -> None:
    """Where communicators do not block, a split goes on when its call has returned."""
    stand_in, tensor = StandIn.load(path), torch.ones(4)
    no_blocking = unittest.mock.patch.dict(os.environ, {"NCCL_COMM_BLOCKING": "0"})
    with no_blocking, communicator(path) as made:
        for polls in (5, 6):  # the call says that it goes on, or nothing of it
            stand_in.inject("in_progress", "split", polls)
            part = made.split(here().rank % 2, 0, "part")
            assert part is not None and part.member.size == (here().size + 1 - here().rank % 2) // 2
            Tensors(part).all_reduce(tensor.fill_(1), tensor, dist.ReduceOp.SUM)
            assert tensor.tolist() == [part.member.size] * 4
            stand_in.inject("in_progress", "split", polls)
            some = made.split(-1 if here().rank == 0 else 0, 0, "some")
            assert (some is None) == (here().rank == 0)
            for each in (part, some):
                assert each is None or each.destroy()


def split_for_good(path: str) -> None:
    stand_in = StandIn.load(path)
    stand_in.clear()
    made = create(path, timeout=1)
    with unittest.mock.patch.dict(os.environ, {"NCCL_COMM_BLOCKING": "0"}):
        stand_in.inject("in_progress", "split", 10**9)
        with pytest.raises(
            dist.DistBackendError,
            match=r"nccl_split .*timed out after 1000 ms: NCCL is still at it",
        ):
            made.split(0, 0, "part")
    stand_in.clear()


def asynchronous(path: str) -> str:
    stand_in = StandIn.load(path)
    stand_in.clear()
    made = create(path)
    call, tensor = Tensors(made), torch.ones(4)
    stand_in.inject("async_error", "*", 6, after=2)
    for number in range(4):
        assert (made.async_error() is None) == (number < 3), number
        if number < 3:
            call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    error = made.async_error()
    with pytest.raises(dist.DistBackendError, match="asynchronous error"):
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    made.abort("a peer is gone")
    with pytest.raises(dist.DistBackendError, match="a peer is gone"):
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    stand_in.clear()
    assert type(error) is dist.DistBackendError
    return str(error)


def freed(made: NcclCommunicator, stand_in: StandIn, name: str, hang: Callable[[], None]) -> None:
    """Hangs on this thread in a call, is aborted from another, and raises the reason of that."""
    results: list[bool] = []

    def abort() -> None:
        stand_in.wait_for(name)
        results.append(made.abort("somebody said so"))

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(
        dist.DistBackendError, match=r"^fastcoll\.\w+ \[group 'g', rank \d/\d\]: somebody said so$"
    ):
        hang()
    thread.join(20)
    assert results == [True]


def hangs(path: str, name: str) -> None:
    stand_in, tensor = StandIn.load(path), torch.ones(4)
    stand_in.clear()
    made = create(path)
    call = Tensors(made)

    def in_group() -> None:
        with made.group():
            call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)

    if name == "absent":  # only this rank calls
        if here().rank == 0:
            freed(
                *(made, stand_in, "allReduce"),
                lambda: call.all_reduce(tensor, tensor, dist.ReduceOp.SUM),
            )
        else:
            made.abort()
    elif name == "in progress":
        stand_in.inject("in_progress", "broadcast", 10**9)
        freed(made, stand_in, "broadcast", lambda: call.broadcast(tensor, tensor, 0))
    elif name == "unmatched":
        if here().rank == 0:
            freed(made, stand_in, "recv", lambda: call.receive(tensor, 1))
        else:
            made.abort()
    else:
        stand_in.inject("hang", name)
        hang = in_group if name == "groupEnd" else lambda: call.broadcast(tensor, tensor, 0)
        freed(made, stand_in, name, hang)
    stand_in.clear()


def split_hangs(path: str) -> None:
    """A rank that does not split: the others give up, and their communicator is no more."""
    made = create(path, timeout=1)
    if here().rank == 0:
        with pytest.raises(
            dist.DistBackendError, match=r"nccl_split .*timed out after 1000 ms: not all"
        ):
            made.split(0, 0, "part")
        assert made.closed is not None and "not all ranks" in made.closed
    made.abort()


def check_unusable(made: NcclCommunicator, text: str) -> None:
    tensor = torch.ones(1)
    for use in (
        lambda: Tensors(made).all_reduce(tensor, tensor, dist.ReduceOp.SUM),
        lambda: made.split(0, 0, "part"),
        lambda: made.handle,
        lambda: made.register(tensor.data_ptr(), 4),
    ):
        with pytest.raises(dist.DistBackendError, match=text):
            use()


def ends(path: str) -> None:
    """Every end may come again, from any thread, and NCCL hears of one."""
    stand_in = StandIn.load(path)
    for first in ("destroy", "abort"):
        stand_in.clear()
        made = create(path, name=first)
        assert made.closed is None and made.handle
        assert getattr(made, first)()
        threads = [threading.Thread(target=end) for end in (made.abort, made.destroy) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = stand_in.names()
        assert names.count("abort") + names.count("destroy") == 1 and first in names
        text = "was destroyed" if first == "destroy" else "was aborted"
        check_unusable(made, text)
        assert text in str(made.async_error())


def ends_that_hang(path: str) -> list[float]:
    """They are left behind; NCCL is not asked again."""
    stand_in, times = StandIn.load(path), []
    for name in ("destroy", "abort"):
        stand_in.clear()
        made = create(path, name=name)
        stand_in.inject("hang", name)
        start = time.monotonic()
        assert not getattr(made, name)(seconds=0.3)
        times.append(time.monotonic() - start)
        assert not made.abort(seconds=0.1)
        names = stand_in.names()
        assert names.count("abort") + names.count("destroy") == 1 and name in names
    stand_in.clear()
    return times


def memory(path: str) -> list[str]:
    stand_in, tensor = StandIn.load(path), torch.ones(64)
    with communicator(path) as made:
        stand_in.clear()
        made.deregister(made.register(tensor.data_ptr(), 256))
        with pytest.raises(dist.DistBackendError, match=r"nccl_register .*no address"):
            made.register(0, 256)
        names = stand_in.names()
        address = made.library.allocate(5000)
        assert address % 4096 == 0
        made.library.free(address)
    return names


def test_every_status_is_told_with_its_remedy(world: Worlds, stand_in: str) -> None:
    (texts,) = world(1).run(every_status, stand_in, init=False)
    for status, text in zip((1, 2, 3, 4, 5, 6, 8), texts, strict=True):
        assert text.startswith("fastcoll.all_reduce [group 'g', rank 0/1]: NCCL 2.29.7 reports ")
        assert f"(status {status}): injected into allReduce. " in text
        assert text.endswith(".")
    assert len({text.rpartition("allReduce. ")[2] for text in texts}) == len(texts)


def test_an_asynchronous_error_is_seen_by_the_next_look(world: Worlds, stand_in: str) -> None:
    for rank, text in enumerate(world(2).run(asynchronous, stand_in, init=False)):
        assert text.startswith(
            f"fastcoll.nccl [group 'g', rank {rank}/2]: asynchronous error: NCCL "
        )
        assert "injected asynchronous error. Another rank" in text


@pytest.mark.parametrize("name", ["absent", "unmatched", "broadcast", "groupEnd", "in progress"])
def test_an_abort_frees_the_thread_that_hangs_in_a_call(
    world: Worlds, stand_in: str, name: str
) -> None:
    world(2).run(hangs, stand_in, name, init=False)


def test_ends_that_hang_are_left_behind(world: Worlds, stand_in: str) -> None:
    for seconds in world(1).run(ends_that_hang, stand_in, init=False)[0]:
        assert 0.3 <= seconds < bound(5)


def test_memory_is_registered(world: Worlds, stand_in: str) -> None:
    assert world(1).run(memory, stand_in, init=False) == [["register", "deregister", "register"]]


@pytest.mark.parametrize(
    "function, size",
    [
        (every_call, 1),
        (in_progress, 2),
        (split_in_progress, 3),
        (split_for_good, 1),
        (split_hangs, 2),
        (ends, 1),
    ],
)
def test_between_ranks(world: Worlds, stand_in: str, function: object, size: int) -> None:
    world(size).run(function, stand_in, init=False)  # type: ignore[arg-type]
