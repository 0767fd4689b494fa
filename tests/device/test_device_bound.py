"""Groups whose process was told its device: the communicator is there at once, and can be divided."""

import inspect

import device_ranks
import torch
import torch.distributed as dist
from backend import TORCH
from device_ranks import called
from on_ranks import on_ranks
from world import here, init_group

DEVICE = "recording:0"


def bound():
    """Makes the default group and returns rank and size."""
    init_group(seconds=40, backend="fastcoll", device_id=torch.device(DEVICE))
    return here().rank, here().size


@on_ranks(3, world="nccl_world", init=False)
def test_a_group_is_divided():
    device_ranks.stand_in().fakeNcclClearCalls()
    rank, size = bound()
    assert called("initRank") == 1
    part = dist.split_group(split_ranks=[[0, 2], [1]])
    last = dist.split_group(split_ranks=[[size - 1, 0]])
    assert called("split") == 2
    x = torch.full((4,), 1.0 + rank, device=DEVICE)
    y = x.clone()
    dist.all_reduce(x, group=part)
    assert x.tolist() == [{0: 4.0, 1: 2.0, 2: 4.0}[rank]] * 4
    outside = last is (dist.GroupMember.NON_GROUP_MEMBER if TORCH >= (2, 14) else None)
    assert outside == (rank == 1)
    if not outside:
        sorts = "sorted(split_group)" in inspect.getsource(dist.split_group)  # before torch 2.14
        assert dist.get_rank(last) == ((rank == 0) != sorts)
        dist.all_reduce(y, group=last)
        assert y.tolist() == [4.0] * 4
    dist.all_reduce(z := torch.ones(4, device=DEVICE))
    assert z.tolist() == [float(size)] * 4 and called("initRank") == 1
    dist.destroy_process_group()


@on_ranks(4, world="nccl_world", init=False)
def test_a_mesh():
    """Two dimensions, as tensor and data parallel training makes them."""
    rank, _ = bound()
    found = dist.init_device_mesh("recording", (2, 2), mesh_dim_names=("data", "tensor"))
    for name, expected in (("data", 2 * (rank % 2) + 2), ("tensor", 4 * (rank // 2) + 1)):
        x = torch.full((3,), float(rank), device=DEVICE)
        dist.all_reduce(x, group=found.get_group(name))
        assert x.tolist() == [float(expected)] * 3, name
    dist.destroy_process_group()


@on_ranks(3, world="nccl_world", init=False)
def test_messages():
    """Sends and receives by themselves make no communicator of their own."""
    device_ranks.stand_in().fakeNcclClearCalls()
    rank, _ = bound()
    x = torch.full((5,), float(rank), device=DEVICE)
    y = torch.empty(5, device=DEVICE)
    if rank == 0:
        dist.send(x, 2)
        dist.irecv(y, 2).wait()
        assert y.tolist() == [2.0] * 5
    elif rank == 2:
        dist.recv(y, 0)
        dist.isend(x, 0).wait()
        assert y.tolist() == [0.0] * 5
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 5
    assert called("initRank") == 1 and called("split") == 0
    dist.destroy_process_group()
