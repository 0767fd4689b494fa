"""Collectives of Python objects."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks


@dataclasses.dataclass
class Point:
    x: int
    y: list


def objects(rank):
    """Objects whose pickles differ in size from rank to rank."""
    return {
        "rank": rank,
        "text": "ä" * (1000 * rank),
        "nested": [None, (rank, 2.5), Point(rank, [1] * rank)],
        "array": torch.arange(rank).tolist(),
    }


@on_ranks(1, 2, 3)
def test_all_gather_object():
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, objects(dist.get_rank()))
    assert got == [objects(r) for r in range(dist.get_world_size())]


@pytest.mark.parametrize("root", [0, 2])
@on_ranks(3)
def test_gather_object(root):
    got = [None] * dist.get_world_size() if dist.get_rank() == root else None
    dist.gather_object(objects(dist.get_rank()), got, dst=root)
    if got is not None:
        assert got == [objects(r) for r in range(dist.get_world_size())]


@pytest.mark.parametrize("root", [0, 2])
@on_ranks(3)
def test_broadcast_object_list(root):
    wanted = [objects(3), "second", None]
    got = list(wanted) if dist.get_rank() == root else [None] * 3
    dist.broadcast_object_list(got, src=root)
    assert got == wanted


@pytest.mark.parametrize("root", [0, 2])
@on_ranks(3)
def test_scatter_object_list(root):
    size = dist.get_world_size()
    got = [None]
    given = [objects(r) for r in range(size)] if dist.get_rank() == root else [None] * size
    dist.scatter_object_list(got, given, src=root)
    assert got == [objects(dist.get_rank())]


@on_ranks(2)
def test_send_object_list():
    if dist.get_rank() == 0:
        dist.send_object_list([objects(2), 7], dst=1)
    elif dist.get_rank() == 1:
        got = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [objects(2), 7]


@on_ranks(3)
def test_objects_that_hold_tensors():
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, {"weight": torch.full((3,), float(dist.get_rank()))})
    for rank, state in enumerate(got):
        assert torch.equal(state["weight"], torch.full((3,), float(rank)))
