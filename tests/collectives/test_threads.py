"""Collectives on several threads of a rank (FASTCOLL_THREADS); see also tests/cpp/stress_collectives.cpp."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import fastcoll

COUNT = (1 << 20) + 77  # of float32


def results(group):
    """Return what each collective of a long message gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine, all_parts = torch.randn(COUNT), torch.randn(COUNT * size)
    summed, cast = mine.clone(), mine.bfloat16()
    dist.all_reduce(summed, group=group)
    dist.all_reduce(cast, dist.ReduceOp.AVG, group=group)
    gathered, part, moved = torch.empty(COUNT * size), torch.empty(COUNT), torch.empty(COUNT * size)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.reduce_scatter_tensor(part, all_parts, group=group)
    dist.all_to_all_single(moved, all_parts, group=group)
    sent = mine.clone()
    dist.broadcast(sent, size - 1, group=group)
    shared = fastcoll.empty_shared(COUNT, group=group).copy_(mine)
    dist.all_reduce(shared, group=group)  # in place
    later = mine.clone()
    dist.all_reduce(later, group=group, async_op=True).wait()
    fused = fused_sums(group._get_backend(mine.device), mine, all_parts)
    return [summed, cast, gathered, part, moved, sent, shared, later, *fused]


def fused_sums(backend, mine, all_parts):
    """Return the sums of float32 that travels so or in 16 bits, and their sums of squares."""
    found = []
    for wire in (None, torch.half, torch.bfloat16):
        summed, part, exchanged = mine.clone(), torch.empty(COUNT), torch.empty(COUNT)
        squares = torch.zeros(2, 1, dtype=torch.float64)
        pieces = list(summed.split(COUNT // 3))
        backend.all_reduce_fused(pieces, dist.ReduceOp.AVG, wire, squares[0])
        backend.reduce_scatter_fused(part, all_parts, dist.ReduceOp.SUM, wire, squares[1])
        backend.reduce_scatter_fused(exchanged, all_parts, dist.ReduceOp.SUM, wire)
        found += [summed, part, exchanged, squares]
    return found


def helpers():
    """Return how many threads of the pool this process has."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("fastcoll-work")


@pytest.mark.parametrize("hosts", [1, 2])
@on_ranks(1, 2, 3)
def test_bits_do_not_depend_on_the_number_of_threads(hosts):
    os.environ["FASTCOLL_HOST_ID"] = f"host {dist.get_rank() * hosts // dist.get_world_size()}"
    by_threads = {}
    for threads in (1, 2, 5):
        options = fastcoll.Options(threads=threads)
        by_threads[threads] = results(dist.new_group(backend="fastcoll", pg_options=options))
        if threads == 5:
            assert helpers() >= 2
    one, *others = by_threads.values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@on_ranks(2)
def test_a_short_message_stays_on_one_thread():
    group = dist.new_group(backend="fastcoll", pg_options=fastcoll.Options(threads=4))
    before = helpers()
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), group=group)
    assert helpers() <= before
