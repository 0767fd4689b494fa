"""What two ranks exchange in place, at the sizes where pieces, lines, blocks and segments end.

Oracle: the peer's message, which is made here too; reductions against ``oracle``.
"""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, name_of
from oracle import assert_reduced, assert_same, sample

Group = dist.ProcessGroup | None
LINE, BLOCK, LEAST = 64, 8192 - 64, 8192
SEGMENT, MOST = 512 << 10, 8 << 20
LENGTHS = sorted(
    {
        length + more
        for length in (LEAST, 2 * BLOCK, 3 * BLOCK, SEGMENT, SEGMENT + 2 * LINE, 3 * SEGMENT, MOST)
        for more in (-1, 0, 1, LINE, LINE + 1)
    }
)
UNLIKE = [
    (0, LEAST),
    (1, SEGMENT),
    (LEAST - 1, LEAST),
    (2 * BLOCK + 1, SEGMENT + 1),
    (SEGMENT, 3 * SEGMENT + 7),
    (5 * SEGMENT + 3, 0),
    (MOST, MOST + 1),
    (LINE, MOST),
]
BOTH_WAYS = [pair for one in UNLIKE for pair in (one, one[::-1])]


def message(rank: int, length: int) -> torch.Tensor:
    return sample(rank, (length,), torch.uint8)


def exchange(sizes: list[tuple[int, int]], group: Group = None) -> None:
    """all_to_all of bytes: rank r has sizes[r] for the other, and half as many for itself."""
    mine = dist.get_rank()
    for pair in sizes:
        splits = [[pair[r] // 2 if d == r else pair[r] for d in range(2)] for r in range(2)]
        given = torch.cat([message(2 * mine + d, splits[mine][d]) for d in range(2)])
        coming = [splits[r][mine] for r in range(2)]
        output = torch.full((sum(coming),), 7, dtype=torch.uint8)
        dist.all_to_all_single(output, given, coming, splits[mine], group)
        assert_same(output, torch.cat([message(2 * r + mine, coming[r]) for r in range(2)]))
        assert_same(given, torch.cat([message(2 * mine + d, splits[mine][d]) for d in range(2)]))


def gather(sizes: list[tuple[int, int]], group: Group = None) -> None:
    for pair in sizes:
        outputs = [torch.empty(length, dtype=torch.uint8) for length in pair]
        dist.all_gather(outputs, message(dist.get_rank(), pair[dist.get_rank()]), group)
        for rank, output in enumerate(outputs):
            assert_same(output, message(rank, pair[rank]))


def reduce(lengths: list[int], dtype: torch.dtype, group: Group = None) -> None:
    """reduce_scatter of so many bytes for each rank, as far as the type allows."""
    mine = dist.get_rank()
    for length in lengths:
        inputs = [
            [sample(2 * r + d, (length // dtype.itemsize,), dtype) for d in range(2)]
            for r in range(2)
        ]
        output = torch.empty(length // dtype.itemsize, dtype=dtype)
        dist.reduce_scatter(output, inputs[mine], group=group)
        assert_reduced(output, [row[mine] for row in inputs], "SUM")


def everything(group: Group) -> None:
    """All three, with messages that are cut into many segments."""
    lengths = [LEAST - 1, LEAST, 2 * BLOCK + 1, 100_003]
    alike = [(length, length) for length in lengths]
    exchange([*alike, (0, LEAST), (20_001, 3), (LEAST - 1, LEAST)], group)
    gather(alike, group)
    reduce(lengths, torch.bfloat16, group)


def through_small_segments() -> None:
    """In the smallest ring, and in segments of a line."""
    import fastcoll
    import fastcoll.tuning

    table = type(fastcoll.tuning.load().table)()  # one of its own: that of load() is everybody's
    table.segment_bytes = 1
    for options in (fastcoll.Options(ring_bytes=16384), fastcoll.Options(tuning=table)):
        group = dist.new_group(backend="fastcoll", pg_options=options)
        everything(group)
        dist.destroy_process_group(group)


def test_all_to_all(world):
    world(2).run(exchange, [(length, length) for length in LENGTHS])


def test_all_to_all_of_unlike_lengths(world):
    world(2).run(exchange, BOTH_WAYS)


def test_all_gather(world):
    world(2).run(gather, [(length, length) for length in LENGTHS])


@beyond_gloo("has no fastcoll.Options")
def test_small_rings_and_segments(world):
    world(2).run(through_small_segments)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float, torch.complex128], ids=name_of
)
def test_reduce_scatter(world, dtype):
    world(2).run(reduce, LENGTHS[:-5], dtype)
