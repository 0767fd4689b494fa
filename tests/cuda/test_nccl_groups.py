"""Calls issued together, divided communicators, several devices, and the stream of each call."""

import itertools
import unittest.mock
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import StandIn, Tensors, communicator, store
from world import Worlds
from world_rank import here

from fastcoll._load import C
from fastcoll.cuda.engine import CudaEngine
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_life import ABORT_SECONDS


def order(rank: int, size: int) -> list[tuple[int, int]]:
    """Peers to send to, and to receive from; the two orders do not go together, and differ between ranks."""
    sends = [(rank + step) % size for step in range(size)]
    return list(zip(sends, sends[::-1] if rank < 2 else sorted(sends), strict=True))


def messages_in_any_order(path: str) -> None:
    """Each rank to each, also to itself, two messages a pair, in another order on every rank."""
    rank, size = here().rank, here().size
    with communicator(path) as made:
        call = Tensors(made)
        for length in (3, 50_000):
            out = [torch.full((2, length), float(10 * rank + peer)) for peer in range(size)]
            into = [torch.zeros(2, length) for _ in range(size)]
            for peer in range(size):
                out[peer][1] += 0.5
            with made.group():
                for to, of in order(rank, size):
                    if rank % 2:
                        call.send(out[to][0], to)
                        call.send(out[to][1], to)
                    call.receive(into[of][0], of)
                    call.receive(into[of][1], of)
                    if rank % 2 == 0:
                        call.send(out[to][0], to)
                        call.send(out[to][1], to)
            for peer in range(size):
                assert into[peer][0].eq(10 * peer + rank).all()
                assert into[peer][1].eq(10 * peer + rank + 0.5).all()


def a_group_issues_at_its_end(path: str) -> list[str]:
    stand_in = StandIn.load(path)
    with communicator(path) as made:
        call = Tensors(made)
        tensor, result = torch.ones(4), torch.zeros(4)
        stand_in.clear()
        with made.group():
            with made.group():
                call.all_reduce(tensor, result, dist.ReduceOp.SUM)
            call.broadcast(tensor, tensor, 0)
            assert result.eq(0).all()
        assert result.eq(here().size).all()
        return stand_in.names()


def a_body_that_raises_issues_nothing(path: str) -> None:
    with communicator(path) as made:
        call = Tensors(made)
        tensor, result = torch.ones(4), torch.zeros(4)
        for error in (ZeroDivisionError, TypeError, dist.DistBackendError):
            with pytest.raises(error), made.group():
                call.all_reduce(tensor, result, dist.ReduceOp.SUM)
                if error is ZeroDivisionError:
                    raise ZeroDivisionError
                if error is TypeError:
                    call.all_reduce(tensor.short(), result, dist.ReduceOp.SUM)
                call.broadcast(tensor, tensor, 99)
            assert result.eq(0).all()
        call.all_reduce(tensor, result, dist.ReduceOp.SUM)
        assert result.eq(here().size).all()


def divided(path: str) -> None:
    rank, size = here().rank, here().size
    with communicator(path) as made:
        reverse = made.split(0, -rank, "reverse")
        assert reverse is not None
        assert (reverse.member.group, reverse.member.rank) == ("reverse", size - 1 - rank)
        parity = made.split(rank % 2, 0, "parity")
        assert parity is not None
        assert (parity.member.rank, parity.member.size) == (rank // 2, (size + 1 - rank % 2) // 2)
        some = made.split(5 if rank else -1, 0, "some")
        assert (some is None) == (rank == 0)
        for part in (reverse, parity, some):
            if part is not None:
                mine = torch.tensor([float(rank)])
                gathered = torch.zeros(part.member.size)
                Tensors(part).all_gather(mine, gathered)
                ranks = [*range(size)]
                wanted = {"reverse": ranks[::-1], "parity": ranks[rank % 2 :: 2], "some": ranks[1:]}
                assert gathered.tolist() == wanted[part.member.group]
                assert part.destroy()
        with pytest.raises(
            ValueError, match=r"nccl_split .*expected a color of at least -1, got -2"
        ):
            made.split(-2, 0, "none")


def streams(path: str) -> list[tuple[str, int]]:
    stand_in = StandIn.load(path)
    with communicator(path) as made:
        call, tensor = Tensors(made), torch.ones(here().size)
        stand_in.clear()
        stand_in.expect_stream(Tensors.STREAM)
        call.all_reduce(tensor, tensor, dist.ReduceOp.SUM)
        call.broadcast(tensor, tensor, 0)
        call.STREAM = 9
        with pytest.raises(dist.DistBackendError, match="broadcast on stream 0x9 instead of 0x7"):
            call.broadcast(tensor, tensor, 0)
        return [(name, arguments["stream"]) for name, arguments in stand_in.calls()]


def engine_of(name: str, timeout: float = 30) -> CudaEngine:
    limit = timedelta(seconds=timeout)
    return CudaEngine(store(name), "g", here().rank, here().size, limit, device_type="cpu")


def reduce(engine: CudaEngine, tensor: torch.Tensor, device: int = 0, pair: int = -1) -> None:
    address, count = tensor.data_ptr(), tensor.numel()
    kinds = C.COLLECTIVES.index("all_reduce"), C.DTYPES.index("float32"), C.REDUCE_OPS.index("SUM")
    calls = engine.communicators.find(device, pair)
    assert calls is not None
    calls.issue(*kinds, -1, 1.0, 0, address, count, address, count, 0)


def devices(path: str) -> None:
    stand_in = StandIn.load(path)
    stand_in.clear()
    engine, tensor = engine_of("engine"), torch.ones(1)
    assert "initRank" not in stand_in.names()
    for device in (0, 1, 0):
        engine.prepare(device, -1, False)
        reduce(engine, tensor, device)
    assert tensor.item() == here().size ** 3
    assert stand_in.names().count("initRank") == 2
    with pytest.raises(ValueError, match="cannot be captured"):
        engine.prepare(2, -1, True)
    engine.close()
    assert stand_in.names().count("destroy") == 2


def ends(path: str) -> None:
    """Communicators that hang share the time that there is to destroy them; each is tried."""
    stand_in, waited = StandIn.load(path), []
    stand_in.clear()
    engine = engine_of("ends")
    for device in range(3):
        engine.prepare(device, -1, False)
    destroy = NcclCommunicator.destroy

    def recorded(self: NcclCommunicator, seconds: float | None = None) -> bool:
        assert seconds is not None
        waited.append(seconds)
        return destroy(self, 0.6)

    stand_in.inject("hang", "destroy", times=2)
    with unittest.mock.patch.object(
        NcclCommunicator, "destroy", recorded
    ):  # this process serves other tests too
        engine.close()
    assert stand_in.names().count("destroy") == 3
    assert waited[0] > ABORT_SECONDS and waited[0] > waited[1] + 0.5 > waited[2] + 1
    stand_in.clear()


def pairs(path: str) -> None:
    """Each pair of ranks has a communicator of its own, on each device."""
    StandIn.load(path).clear()
    engine, me = engine_of("pairs"), here().rank
    for low, high in itertools.combinations(range(here().size), 2):
        if me in (low, high):
            for device in range(2):
                tensor = torch.tensor([1.0 + me])
                engine.prepare(device, low + high - me, False)
                reduce(engine, tensor, device, low + high - me)
                assert tensor.item() == low + high + 2
    engine.close()


def an_aborted_group(path: str) -> None:
    """What the watchdog has aborted is not touched by this side, neither in a group nor at the end."""
    stand_in = StandIn.load(path)
    stand_in.clear()
    engine, tensor = engine_of("aborted"), torch.ones(1)
    engine.prepare(0, -1, False)
    communicator = engine._known[0, -1]
    calls = communicator.calls
    assert engine.communicators.find(0, -1) is calls
    engine.communicators.abort_all()
    assert engine.communicators.find(0, -1) is None
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        calls.issue(C.COLLECTIVES.index("send"), 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        Tensors(communicator).all_reduce(tensor, tensor, dist.ReduceOp.SUM)
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        engine.prepare(1, -1, False)
    engine.close()
    assert stand_in.names()[-1] == "abort" and stand_in.names().count("abort") == 1


def aborted_while_it_queues(path: str) -> None:
    stand_in = StandIn.load(path)
    engine = engine_of("queues")
    engine.prepare(0, -1, False)
    stand_in.clear()
    with pytest.raises(RuntimeError, match="enough"), engine._known[0, -1].group():
        engine.communicators.abort_all()
        raise RuntimeError("enough")
    assert stand_in.names() == ["groupStart", "abort", "groupEnd"]


def test_a_group_issues_when_the_outermost_ends(world: Worlds, stand_in: str) -> None:
    names = ["groupStart", "groupStart", "allReduce", "groupEnd", "broadcast", "groupEnd"]
    assert world(2).run(a_group_issues_at_its_end, stand_in, init=False) == [names, names]


def test_calls_go_to_the_stream_that_they_name(world: Worlds, stand_in: str) -> None:
    expected = [("allReduce", 7), ("broadcast", 7), ("broadcast", 9)]
    assert world(2).run(streams, stand_in, init=False) == [expected, expected]


@pytest.mark.parametrize(
    "function, size",
    [
        (messages_in_any_order, 1),
        (messages_in_any_order, 2),
        (messages_in_any_order, 3),
        (messages_in_any_order, 4),
        (a_body_that_raises_issues_nothing, 2),
        (divided, 2),
        (divided, 3),
        (divided, 4),
        (devices, 2),
        (ends, 1),
        (pairs, 3),
        (an_aborted_group, 2),
        (aborted_while_it_queues, 2),
    ],
)
def test_between_ranks(world: Worlds, stand_in: str, function: object, size: int) -> None:
    world(size).run(function, stand_in, init=False)  # type: ignore[arg-type]
