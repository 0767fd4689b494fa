"""Groups that are divided, made anew, or two at once: each maps memory of its own, and of its own life."""

import peer_memory
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE
from world import here, init_group


@on_ranks(3, world="peer_world", init=False)
def test_a_part_of_a_group_maps_memory_of_its_own():
    init_group(seconds=40, backend="fastcoll", device_id=torch.device(DEVICE))
    rank = here().rank
    part = dist.split_group(split_ranks=[[0, 2], [1]])
    x = torch.full((400,), 1.0 + rank, device=DEVICE)
    dist.all_reduce(x, group=part)
    assert x.cpu().eq({0: 4.0, 1: 2.0, 2: 4.0}[rank]).all()
    topology = peer_memory.reduces_of(part).region.topology
    assert (topology.ranks, topology.peers) == ((1, False) if rank == 1 else (2, True))
    assert topology.reason == ("there is one rank" if rank == 1 else "")
    dist.all_reduce(x)
    assert x.cpu().eq(10).all()
    dist.destroy_process_group()


@on_ranks(2, world="peer_world", init=False)
def test_lives_of_the_default_group():
    """One store for several lives of the default group."""
    store = dist.FileStore(str(here().scratch / "store"), here().size)
    for life in range(3):
        dist.init_process_group("fastcoll", store=store, rank=here().rank, world_size=here().size)
        x = torch.full((300,), 1.0 + life, device=DEVICE)
        dist.all_reduce(x)
        assert x.cpu().eq(here().size * (1.0 + life)).all()
        assert peer_memory.reduces_of().chosen == "one_shot"
        dist.barrier()
        dist.destroy_process_group()


@on_ranks(2, world="peer_world")
def test_two_groups_on_one_device():
    """Two groups in turns on one device, each with its own region."""
    first, second = dist.new_group(), dist.new_group()
    x = torch.ones(700, device=DEVICE)
    works = []
    for group in (first, second, first, second):
        works.append(dist.all_reduce(x, group=group, async_op=True))
        works[-1].wait()
    assert x.cpu().eq(2.0**4).all()
    regions = [peer_memory.reduces_of(group).region.peers for group in (first, second)]
    assert regions[0].buffers.memory.data_ptr() != regions[1].buffers.memory.data_ptr()
