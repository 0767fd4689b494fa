"""all_to_all of a list and of one tensor, with even and uneven splits."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from oracle import assert_same, moved_types, sample

import fastcoll

EVEN = [[2, 2, 2]] * 3
UNEVEN = [[0, 1, 5], [3, 0, 2], [4, 4, 0]]
ONE_SIDED = [[0, 0, 7], [0, 0, 0], [0, 0, 0]]
LARGE = [[1, 70001, 3], [100003, 2, 5], [7, 11, 50021]]


def sent(source, target, rows, dtype):
    return sample(10 * source + target, (rows, 3), dtype)


def exchange_lists(splits, dtype):
    mine, size = dist.get_rank(), dist.get_world_size()
    inputs = [sent(mine, t, splits[mine][t], dtype) for t in range(size)]
    outputs = [torch.empty(splits[s][mine], 3, dtype=dtype) for s in range(size)]
    dist.all_to_all(outputs, inputs)
    for source, output in enumerate(outputs):
        assert_same(output, sent(source, mine, splits[source][mine], dtype))


def exchange_tensor(splits, dtype, tell_splits=True, async_op=False):
    mine, size = dist.get_rank(), dist.get_world_size()
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    parts = [sent(mine, t, splits[mine][t], dtype).view(raw) for t in range(size)]
    expected = [sent(s, mine, splits[s][mine], dtype).view(raw) for s in range(size)]
    given, wanted = torch.cat(parts).view(dtype), torch.cat(expected).view(dtype)
    output = torch.empty_like(wanted)
    incoming = [row[mine] for row in splits] if tell_splits else None
    outgoing = splits[mine] if tell_splits else None
    work = dist.all_to_all_single(output, given, incoming, outgoing, async_op=async_op)
    if async_op:
        work.wait()
    assert_same(output, wanted)
    assert_same(given, torch.cat(parts).view(dtype))


def alike_and_unlike(seed, rounds):
    """A rank writes its first segment before it knows whether the others cut their messages as it does."""
    mine, size = dist.get_rank(), dist.get_world_size()
    random = Random(seed)
    for turn in range(rounds):
        most = random.choice([0, 100, 3000, 40_000, 300_000])
        splits = [
            [random.choice([most, most, most // 2, 0]) for _ in range(size)] for _ in range(size)
        ]
        if turn % 3 == 0:  # all ranks have the same longest message
            splits = [[most] * size for _ in range(size)]
        given = torch.cat(
            [
                torch.arange(splits[mine][target]) + 1000 * mine + target + turn
                for target in range(size)
            ]
        )
        if random.random() < 0.3 and mine != random.randrange(size):
            shared = fastcoll.empty_shared(given.numel(), dtype=given.dtype)
            given = shared.copy_(given)
        incoming = [row[mine] for row in splits]
        output = given.new_full((sum(incoming),), -1)
        dist.all_to_all_single(output, given, incoming, splits[mine])
        for source, part in enumerate(output.split(incoming)):
            assert torch.equal(part, torch.arange(part.numel()) + 1000 * source + mine + turn)


def wrong_splits():
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 3])
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_to_all_single(torch.empty(5), torch.ones(5))  # two ranks, no splits
    dist.barrier()


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_tensor_type(world, dtype):
    world(3).run(exchange_tensor, UNEVEN, dtype)


@pytest.mark.parametrize("splits", [EVEN, UNEVEN, ONE_SIDED, LARGE], ids=lambda s: str(s[0]))
def test_tensor_splits(world, splits):
    world(3).run(exchange_tensor, splits, torch.float)
    world(3).run(exchange_tensor, splits, torch.float, True, True)


@beyond_gloo("has no tensors in shared memory")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_longest_messages_alike_and_unlike(world, size):
    for seed in range(3):
        world(size).run(alike_and_unlike, seed, 30)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_tensor_without_splits(world, size):
    world(size).run(exchange_tensor, [[2] * size] * size, torch.float, False)


@pytest.mark.parametrize("dtype", moved_types(), ids=name_of)
def test_list_type(world, dtype):
    world(3).run(exchange_lists, EVEN, dtype)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_list_world_size(world, size):
    world(size).run(exchange_lists, [[3] * size] * size, torch.float)


@beyond_gloo("refuses unequal sizes")
@pytest.mark.parametrize("splits", [UNEVEN, ONE_SIDED, LARGE], ids=lambda s: str(s[0]))
def test_list_of_unequal_sizes(world, splits):
    world(3).run(exchange_lists, splits, torch.float)


@beyond_gloo("reads past the end of the input")
def test_wrong_splits_are_refused_before_anything_is_sent(world):
    world(2).run(wrong_splits)
