"""Collectives on several threads of a rank (FASTCOLL_THREADS); see also tests/cpp/stress_collectives.cpp."""

from pathlib import Path

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
    return [summed, cast, gathered, part, moved, sent, shared, later]


def helpers():
    """Return how many threads of the pool this process has."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("fastcoll-work")


@on_ranks(1, 2, 3)
def test_bits_do_not_depend_on_the_number_of_threads():
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
