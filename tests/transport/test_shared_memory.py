"""Shared memory: many ranks, tensors in it, and that it is given back."""

import gc
import os
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, shared_bytes
from collective_cases import MOVING, REDUCING, Case, run_all
from fault_list import plays
from on_ranks import on_ranks
from oracle import assert_same
from world import here

import fastcoll

pytestmark = beyond_gloo("fastcoll's own shared memory")

RETIREMENT = 2.5
"""Seconds after which memory of a group that is gone is used again: kRetirement of arena.cpp, and some."""


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


# --- world sizes ---------------------------------------------------------------------------------


@on_ranks(
    pytest.param(16, marks=plays(42)),
    pytest.param(64, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    world="own_worlds",
    deadline=280,
)
def test_many_ranks():
    run_all(
        Case(name, shape=(count,), root=-1)
        for name in [*REDUCING, *MOVING]
        for count in (1, 100, 12_000)
    )
    assert backend().transport() == "shm"


# --- tensors in shared memory --------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_allocated():
    mine, size = here().rank, here().size
    cpu = torch.device("cpu")
    dist.barrier()
    before = shared_bytes()
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        tensor = backend().allocate_tensor(70_000, dtype=dtype, device=cpu)
        assert tensor.shape == (70_000,) and tensor.dtype == dtype and tensor.device == cpu
        tensor.fill_(1)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if dtype == torch.bool else dist.ReduceOp.SUM)
        expected = torch.full((70_000,), 1 if dtype == torch.bool else size).to(dtype)
        assert torch.equal(tensor, expected)
    del tensor
    assert shared_bytes() <= before + (4 << 20), (
        "beside slots that stay, the tensors are still there"
    )
    tensors = [
        backend().allocate_tensor(1 << 20, dtype=torch.float32, device=cpu) for _ in range(8)
    ]
    held = shared_bytes()
    assert held >= before + (32 << 20)
    view = tensors[3][5:1000].view(5, 199).t()  # a view keeps its tensor's memory
    view.fill_(float(mine))
    del tensors
    gc.collect()
    assert shared_bytes() <= held - (28 << 20)
    dist.broadcast(view, 1)
    assert torch.all(view == 1)
    empty = backend().allocate_tensor(0, dtype=torch.float32, device=cpu)
    dist.all_reduce(empty)
    assert empty.numel() == 0
    with pytest.raises(ValueError, match="at least 0"):
        backend().allocate_tensor(-1, dtype=torch.float32, device=cpu)


@on_ranks(1, fresh=True)
def test_shapes_and_types():
    shared = backend().is_shared
    for size in [((),), (0,), (5,), (3, 0, 2), (4, 5, 6), ([2, 3],), (torch.Size([7]),)]:
        tensor = fastcoll.empty_shared(*size)
        assert tensor.shape == torch.empty(*size).shape and tensor.dtype is torch.float
        assert tensor.is_contiguous() and (tensor.numel() == 0 or shared(tensor))
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        tensor = fastcoll.empty_shared(11, dtype=dtype)
        assert tensor.dtype is dtype and shared(tensor)
    assert not shared(torch.empty(11))


@on_ranks(3, fresh=True)
def test_used_by_every_group_and_outlives_all():
    everyone = list(range(dist.get_world_size()))
    group = dist.new_group(everyone)
    tensor = fastcoll.empty_shared(100, 200, group=group).fill_(1.0)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    dist.destroy_process_group(group)
    gc.collect()
    dist.destroy_process_group()
    assert_same(tensor + 1, torch.full((100, 200), float(len(everyone)) ** 2 + 1))


@on_ranks(1, fresh=True)
def test_released():
    """Compared with the moment before: what earlier groups held may go at any time."""
    tensor = fastcoll.empty_shared(1 << 21).fill_(1.0)
    full = held()[2]
    assert full >= 8 << 20
    del tensor
    assert held()[2] <= full - (8 << 20)


@on_ranks(2, fresh=True)
def test_a_tensor_is_moved_once():
    layer = torch.nn.Conv2d(3, 2, 5).to(memory_format=torch.channels_last)
    weight, before = layer.weight, layer.weight.clone()
    moved = fastcoll.share(weight)
    assert moved is weight and backend().is_shared(weight) and weight.requires_grad
    assert torch.equal(weight, before) and weight.stride() == before.stride()
    address = weight.data_ptr()
    assert fastcoll.share(weight).data_ptr() == address
    message = torch.full((70_000,), 1.0 + dist.get_rank())
    plan = fastcoll.communicator().all_reduce_plan(fastcoll.share(message))
    plan()
    assert torch.equal(message, torch.full((70_000,), 3.0))
    with pytest.raises(ValueError, match=r"without gaps and overlaps, got strides \(2,\)"):
        fastcoll.share(message[::2])


@on_ranks(2, fresh=True)
def test_refusals():
    with pytest.raises(ValueError, match=r"sizes of at least 0, got \(3, -1\)"):
        fastcoll.empty_shared(3, -1)
    with pytest.raises(TypeError):
        fastcoll.empty_shared(2.5)
    # Of one rank each: Gloo's connections at times fail on a busy machine.
    other = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=f"got group '{other.group_name}'"):
        fastcoll.empty_shared(3, group=other)
    dist.destroy_process_group(other)


def test_without_a_group():
    with pytest.raises(ValueError, match="got no group"):
        fastcoll.empty_shared(3)


# --- nothing grows -------------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """Return memory that groups have reserved, open files, and resident bytes of all mappings of shared memory."""
    maps = psutil.Process().memory_maps()
    mapped = sum(one.rss for one in maps if "memfd:fastcoll" in one.path)
    return shared_bytes(), len(os.listdir("/proc/self/fd")), mapped


@pytest.mark.full  # waits for the retirement
@on_ranks(2, fresh=True)
def test_groups_that_come_and_go_take_nothing_with_them():
    everyone = list(range(here().size))

    def use(count):
        group = dist.new_group(everyone, timeout=timedelta(seconds=20))
        tensor = torch.ones(count)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        other = here().rank ^ 1
        if other < here().size:
            into = torch.empty(count)
            work = dist.isend(tensor, other, group=group)
            dist.recv(into, other, group=group)
            work.wait()
        dist.destroy_process_group(group)

    for _ in range(3):
        use(300_000)
    gc.collect()
    dist.barrier()
    before = held()
    for _ in range(40):
        use(300_000)
    time.sleep(RETIREMENT)  # what a peer may still look at is given back some time later
    use(300_000)
    gc.collect()
    dist.barrier()
    after = held()
    assert after[0] <= before[0] + (1 << 20), (before, after)
    assert after[1] <= before[1], (before, after)
    assert after[2] <= before[2] + (8 << 20), (before, after)


@on_ranks(2, world="own_worlds")
def test_memory_of_a_group_is_bounded():
    """It does not depend on the size of what goes through it. Counted is the memory of all groups of a process."""
    sizes = []
    for count in (10, 1 << 16, 1 << 22):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        sizes.append(shared_bytes())
    small, middle, large = sizes
    assert small < 1 << 20, small
    assert middle == large < 16 << 20, (middle, large)
