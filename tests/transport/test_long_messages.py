"""Messages of all_to_all, gather and scatter that are so long that they pass by the leaders of hosts."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from world import here

pytestmark = beyond_gloo("fastcoll's own hosts")

# Bytes around the least of a long message, 32 KiB, and far from it.
SIZES = [0, 1, 300, 32 << 10, (32 << 10) + 1, 200_003]


def piece(sender, receiver, size, round_=0):
    return torch.arange(size).add(sender * 31 + receiver * 7 + round_).to(torch.uint8)


def mixed(placement):
    """Long and short messages in one call, beside point-to-point messages of the same lengths between the same."""
    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    rank, size = here().rank, here().size
    group = dist.new_group()
    other = size - 1 - rank
    for round_ in range(6):
        drawn = random.Random(round_)
        sizes = [[drawn.choice(SIZES) for _ in range(size)] for _ in range(size)]
        inputs = [piece(rank, to, sizes[rank][to], round_) for to in range(size)]
        outputs = [torch.zeros(sizes[r][rank], dtype=torch.uint8) for r in range(size)]
        beside = torch.zeros(sizes[other][rank], dtype=torch.uint8)
        works = [
            dist.isend(inputs[other] + 1, other, group=group),
            dist.irecv(beside, other, group=group),
            dist.all_to_all(outputs, inputs, group=group, async_op=True),
        ]
        for work in works:
            work.wait()
        for sender, tensor in enumerate(outputs):
            assert torch.equal(tensor, piece(sender, rank, sizes[sender][rank], round_)), sender
        assert torch.equal(beside, piece(other, rank, sizes[other][rank], round_) + 1)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "placement",
    ["0011", "0123", *(pytest.param(p, marks=pytest.mark.full) for p in ["0101", "0012"])],
)
def test_beside_short_ones_and_sends(world, placement):
    world(len(placement)).run(mixed, placement)


def rooted(placement):
    """The first one of a group may find the root late, or the others."""
    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    rank, size = here().rank, here().size
    for count in (SIZES[3], SIZES[4], SIZES[5]):
        for root in (0, size - 1):
            group = dist.new_group()
            if rank == root:
                time.sleep(0.2)
            for round_ in range(3):
                parts = [piece(root, to, count, round_) for to in range(size)]
                got = torch.zeros(count, dtype=torch.uint8)
                dist.scatter(got, parts if rank == root else None, root, group=group)
                assert torch.equal(got, parts[rank])
                all_ = [torch.zeros_like(got) for _ in range(size)] if rank == root else None
                dist.gather(got, all_, root, group=group)
                if all_ is not None:
                    assert all(map(torch.equal, all_, parts))
            dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "placement", ["0102", *(pytest.param(p, marks=pytest.mark.full) for p in ["0011", "0123"])]
)
def test_with_a_root(world, placement):
    world(len(placement)).run(rooted, placement)
