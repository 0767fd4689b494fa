"""Divided communicators, several devices, pairs, and an aborted group."""

import itertools
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import Tensors, communicator, engine_of, on_stand_in, stand_in
from world import here

from fastcoll._load_cuda import CUDA
from fastcoll.cuda.engine import CudaEngine
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_life import ABORT_SECONDS


@pytest.mark.parametrize("size", [2, 3, 4])
@on_stand_in()
def test_a_communicator_is_divided(size):
    rank = here().rank
    with communicator() as made:
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
                Tensors(part).issue("all_gather", mine, gathered)
                ranks = [*range(size)]
                wanted = {"reverse": ranks[::-1], "parity": ranks[rank % 2 :: 2], "some": ranks[1:]}
                assert gathered.tolist() == wanted[part.member.group]
                assert part.destroy()
        with pytest.raises(
            ValueError, match=r"nccl_split .*expected a color of at least -1, got -2"
        ):
            made.split(-2, 0, "none")


def reduce(engine: CudaEngine, tensor: torch.Tensor, device: int = 0, pair: int = -1) -> None:
    address, count = tensor.data_ptr(), tensor.numel()
    kinds = (
        CUDA.COLLECTIVES.index("all_reduce"),
        CUDA.DTYPES.index("float32"),
        CUDA.REDUCE_OPS.index("SUM"),
    )
    calls = engine.communicators.find(device, pair)
    assert calls is not None
    calls.issue(*kinds, -1, 1.0, 0, address, count, address, count, 0)


@on_stand_in(2)
def test_devices():
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


@on_stand_in(1)
def test_ends():
    """Communicators that hang share the time that there is to destroy them; each is tried."""
    waited: list[float] = []
    engine = engine_of("ends")
    for device in range(3):
        engine.prepare(device, -1, False)
    destroy = NcclCommunicator.destroy

    def recorded(self: NcclCommunicator, seconds: float | None = None) -> bool:
        assert seconds is not None
        waited.append(seconds)
        return destroy(self, 0.6)

    stand_in.inject("hang", "destroy", times=2)
    # This process serves other tests too.
    with unittest.mock.patch.object(NcclCommunicator, "destroy", recorded):
        engine.close()
    assert stand_in.names().count("destroy") == 3
    assert waited[0] > ABORT_SECONDS and waited[0] > waited[1] + 0.5 > waited[2] + 1


@on_stand_in(3)
def test_pairs():
    """Each pair of ranks has a communicator of its own, on each device."""
    engine, me = engine_of("pairs"), here().rank
    for low, high in itertools.combinations(range(here().size), 2):
        if me in (low, high):
            for device in range(2):
                tensor = torch.tensor([1.0 + me])
                engine.prepare(device, low + high - me, False)
                reduce(engine, tensor, device, low + high - me)
                assert tensor.item() == low + high + 2


@on_stand_in(2)
def test_an_aborted_group():
    """What the watchdog has aborted is not touched by this side, neither by a call nor at the end."""
    engine, tensor = engine_of("aborted"), torch.ones(1)
    engine.prepare(0, -1, False)
    communicator = engine._known[0, -1]
    calls = communicator.calls
    assert engine.communicators.find(0, -1) is calls
    engine.communicators.abort_all("a test")
    assert engine.communicators.find(0, -1) is None
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        calls.issue(CUDA.COLLECTIVES.index("send"), 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        Tensors(communicator).all_reduce(tensor, tensor)
    with pytest.raises(dist.DistBackendError, match="the group was aborted"):
        engine.prepare(1, -1, False)
    engine.close()
    assert stand_in.names()[-1] == "abort" and stand_in.names().count("abort") == 1
