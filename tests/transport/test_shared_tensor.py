"""fastcoll.empty_shared: shapes, types, errors, and that collectives find the memory shared."""

import gc

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from oracle import assert_same

import fastcoll
from fastcoll._group_backend import cpu_backend

pytestmark = beyond_gloo("fastcoll's own shared memory")

CPU = torch.device("cpu")


def shapes_and_types():
    backend = cpu_backend(dist.group.WORLD, CPU)
    for size in [((),), (0,), (5,), (3, 0, 2), (4, 5, 6), ([2, 3],), (torch.Size([7]),)]:
        tensor = fastcoll.empty_shared(*size)
        assert tensor.shape == torch.empty(*size).shape and tensor.dtype is torch.float
        assert tensor.is_contiguous() and (tensor.numel() == 0 or backend.is_shared(tensor))
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        tensor = fastcoll.empty_shared(11, dtype=dtype)
        assert tensor.dtype is dtype and backend.is_shared(tensor)
    assert not backend.is_shared(torch.empty(11))


def test_shapes_and_types(world):
    world(1).run(shapes_and_types)


def used_by_groups():
    everyone = list(range(dist.get_world_size()))
    group = dist.new_group(everyone)
    tensor = fastcoll.empty_shared(100, 200, group=group).fill_(1.0)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    dist.destroy_process_group(group)
    gc.collect()
    assert_same(tensor, torch.full((100, 200), float(len(everyone)) ** 2))


def test_it_serves_every_group_and_outlives_its_own(world):
    world(3).run(used_by_groups)


def refusals():
    with pytest.raises(ValueError, match=r"sizes of at least 0, got \(3, -1\)"):
        fastcoll.empty_shared(3, -1)
    with pytest.raises(TypeError):
        fastcoll.empty_shared(2.5)
    # Of one rank each: Gloo's connections at times fail on a busy machine.
    other = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=f"got group '{other.group_name}'"):
        fastcoll.empty_shared(3, group=other)
    dist.destroy_process_group(other)


def test_refusals(world):
    world(2).run(refusals)


def test_without_a_group():
    with pytest.raises(ValueError, match="got no group"):
        fastcoll.empty_shared(3)
