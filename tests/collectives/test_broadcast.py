"""broadcast: from every rank, every element type."""

import pytest
import torch
import torch.distributed as dist
from backend import name_of
from oracle import assert_same, moved_types, sample

SHAPES = [(), (1,), (0,), (7,), (3, 5), (65537,)]


def broadcast_from(root, dtype):
    for seed, shape in enumerate(SHAPES):
        tensor = sample(dist.get_rank(), shape, dtype, seed)
        dist.broadcast(tensor, root)
        assert_same(tensor, sample(root, shape, dtype, seed))


def broadcast_large(elements):
    tensor = sample(dist.get_rank(), (elements,), torch.float)
    work = dist.broadcast(tensor, 1, async_op=True)
    work.wait()
    assert_same(tensor, sample(1, (elements,), torch.float))


def broadcast_in_group(members, root):
    group = dist.new_group(members)
    tensor = sample(dist.get_rank(), (33,), torch.float)
    dist.broadcast(tensor, root, group=group)
    expected = root if dist.get_rank() in members else dist.get_rank()
    assert_same(tensor, sample(expected, (33,), torch.float))
    if dist.get_rank() in members:
        dist.broadcast(tensor, group=group, group_src=0)
        assert_same(tensor, sample(root, (33,), torch.float))


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_type(world, dtype):
    world(3).run(broadcast_from, 1, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_root(world, size):
    for root in range(size):
        world(size).run(broadcast_from, root, torch.float)


def test_large(world):
    world(2).run(broadcast_large, 8 * 2**20)


def test_root_is_a_global_rank(world):
    world(4).run(broadcast_in_group, [1, 3], 3)
