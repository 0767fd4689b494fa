"""Ranks that share a device, which NCCL refuses: all-reduces go by kernels, and all else is refused."""

import functools
from datetime import timedelta
from unittest import mock

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single
from peer_memory import DEVICE
from test_peer_engine import inputs_of, lists_of, oracle

import fastcoll
from fastcoll.cuda.mapping import TorchSymmetricMemory


def sharing(function):
    """All ranks have one device meanwhile."""

    @functools.wraps(function)
    def shared(*arguments):
        with peer_memory.MAPPER.changed(shared="the one device"):
            return function(*arguments)

    return shared


@sharing
def without_nccl():
    me = dist.get_rank()
    with mock.patch("fastcoll.cuda.nccl.NcclCommunicator.create") as create:
        recording_device.clear()
        with recording_device.no_violations():
            for seed, (dtype, count, op) in enumerate((
                (torch.float32, 1, "SUM"), (torch.float32, 20_001, "AVG"),
                (torch.bfloat16, 4099, "MAX"), (torch.float64, 33, "MIN"),
            )):  # fmt: skip
                inputs = inputs_of(count, dtype, seed)
                for async_op in (False, True):
                    x = inputs[me].to(DEVICE)
                    work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=async_op)
                    if async_op:
                        work.wait()
                    assert torch.equal(x.cpu(), oracle(inputs, op.lower())), (dtype, count, op)
            lists = lists_of(torch.float32, 9, (5, 300, 4097, 1, 33))
            tensors = [tensor.to(DEVICE, copy=True) for tensor in lists[me]]
            fastcoll.all_reduce_coalesced(
                tensors, dist.ReduceOp.AVG, wire_dtype=torch.bfloat16, async_op=True
            ).wait()
            for tensor, inputs in zip(tensors, zip(*lists, strict=True), strict=True):
                assert torch.equal(tensor.cpu(), oracle(inputs, "avg", 1.0, torch.bfloat16))
        create.assert_not_called()
    topology = peer_memory.reduces_of().region.topology
    assert (topology.peers, topology.library) == (True, False)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_all_reduces_need_no_nccl(peer_world, size):
    peer_world(size).run(without_nccl, fresh=True)


@sharing
def everything_else():
    """Refused on every rank, and the group is as good as before."""
    x, many = torch.ones(4, device=DEVICE), torch.ones(4 * dist.get_world_size(), device=DEVICE)
    numbers = torch.ones(4, dtype=torch.int64, device=DEVICE)
    dist.all_reduce(x)
    ranks = dist.get_world_size()
    calls = [
        lambda: dist.broadcast(x, 0),
        lambda: all_gather_single(many, x),
        lambda: reduce_scatter_single(x, many),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_to_all_single(many.clone(), many),
        lambda: dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="share recording:0 and NCCL refuses them"):
            call()
    with pytest.raises(ValueError, match=r"ranks share a device, which NCCL refuses"):
        dist.all_reduce(numbers)
    dist.all_reduce(x)
    assert x.cpu().eq(float(ranks**2)).all()


def test_everything_else_is_refused(peer_world):
    peer_world(2).run(everything_else, fresh=True)


@sharing
def forced(algorithm):
    with mock.patch.dict("os.environ", FASTCOLL_ALGO=algorithm):
        group = dist.new_group()
        with pytest.raises(ValueError, match="which NCCL refuses"):
            dist.all_reduce(torch.ones(3, device=DEVICE), group=group)


def test_nccl_cannot_be_forced(peer_world):
    peer_world(2).run(forced, "nccl", fresh=True)


@sharing
def not_mapped():
    """Nothing is left then, and the error says why."""
    with (
        peer_memory.MAPPER.changed(refuses={"map"}),
        pytest.raises(ValueError, match="no mapping in this test"),
    ):
        dist.all_reduce(torch.ones(3, device=DEVICE))


def test_without_mapped_memory_nothing_is_left(peer_world):
    peer_world(2).run(not_mapped, fresh=True)


def devices_of_their_own():
    x = torch.ones(3, device=DEVICE)
    with peer_memory.MAPPER.changed(shared=f"device {dist.get_rank()}"):
        dist.all_reduce(x)
    assert x.cpu().eq(2).all()
    dist.broadcast(x, 0)
    assert peer_memory.reduces_of().region.topology.library


def test_ranks_with_devices_of_their_own_have_nccl(peer_world):
    peer_world(2).run(devices_of_their_own, fresh=True)


@sharing
def one_comes_late():
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(3, device=DEVICE), group=group)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(peer_world):
    text, _ = peer_world(2).run(one_comes_late, fresh=True)
    assert "timed out after 2000 ms: rank 1 has not come" in text


def test_when_it_is_looked_for(monkeypatch):
    mapper, device = TorchSymmetricMemory(), torch.device("cuda", 0)
    monkeypatch.setattr(TorchSymmetricMemory, "_uuid", staticmethod(lambda device: "GPU-1"))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert mapper.shared_identity(device) == "" and mapper.device_identity(device) == "GPU-1"
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert mapper.shared_identity(device).endswith(" GPU-1") and not mapper.device_identity(device)
    monkeypatch.setenv("NCCL_HOSTID", "a host of its own")
    assert mapper.shared_identity(device) == ""
