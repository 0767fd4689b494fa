"""Collectives of Python objects."""

import torch
import torch.distributed as dist
from on_ranks import on_ranks


def objects(rank):
    """Objects whose pickles differ in size from rank to rank."""
    return {
        "rank": rank,
        "text": "ä" * (1000 * rank),
        "nested": [None, (rank, 2.5), range(rank)],
        "array": torch.arange(rank).tolist(),
    }


@on_ranks(3)
def test_objects():
    """Each call with the last rank as its root; PyTorch's own suite has the other roots and groups."""
    mine, size = dist.get_rank(), dist.get_world_size()
    everyones, root = [objects(rank) for rank in range(size)], size - 1

    got = [None] * size
    dist.all_gather_object(got, objects(mine))
    assert got == everyones

    got = [None] * size if mine == root else None
    dist.gather_object(objects(mine), got, dst=root)
    assert got == (everyones if mine == root else None)

    got = list(everyones) if mine == root else [None] * size
    dist.broadcast_object_list(got, src=root)
    assert got == everyones

    got = [None]
    dist.scatter_object_list(got, everyones if mine == root else None, src=root)
    assert got == [objects(mine)]

    if mine == 0:
        dist.send_object_list([objects(2), 7], dst=1)
    elif mine == 1:
        got = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [objects(2), 7]
