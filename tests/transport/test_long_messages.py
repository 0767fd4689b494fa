"""Messages of all_to_all, gather and scatter that are so long that they pass by the leaders of hosts."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import Case, Runner
from world import here

pytestmark = beyond_gloo("fastcoll's own hosts")

# Bytes around the least of a long message, 32 KiB, and far from it.
SIZES = [0, 1, 300, 32 << 10, (32 << 10) + 1, 200_003]


def piece(sender, receiver, size):
    return torch.arange(size).add(sender * 31 + receiver * 7).to(torch.uint8)


def mixed(placement):
    """Long and short messages in one call, beside point-to-point messages of the same lengths between the same."""
    os.environ["FASTCOLL_HOST_ID"] = placement[here().rank]
    rank, size = here().rank, here().size
    group = dist.new_group()
    other = size - 1 - rank
    for round_ in range(6):
        drawn = random.Random(round_)
        sizes = tuple(tuple(drawn.choice(SIZES) for _ in range(size)) for _ in range(size))
        given, got = piece(rank, other, sizes[rank][other]), piece(other, rank, sizes[other][rank])
        beside = torch.zeros_like(got)
        works = [dist.isend(given, other, group=group), dist.irecv(beside, other, group=group)]
        case = Case(
            *("all_to_all", "SUM", torch.uint8, ()), splits=sizes, async_op=True, seed=round_
        )
        runner = Runner(case, group)
        for work in works:
            work.wait()
        runner.check()
        assert torch.equal(beside, got)
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
            for seed in range(3):
                for name in ("scatter", "gather"):
                    case = Case(name, dtype=torch.uint8, shape=(count,), root=root, seed=seed)
                    Runner(case, group).check()
            dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "placement", ["0102", *(pytest.param(p, marks=pytest.mark.full) for p in ["0011", "0123"])]
)
def test_with_a_root(world, placement):
    world(len(placement)).run(rooted, placement)
