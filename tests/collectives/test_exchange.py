"""What two ranks exchange in place, at the sizes where pieces, lines, blocks and segments end.

Oracle: the peer's message, which is made here too; reductions against ``oracle``.
"""

import pytest
import torch
import torch.distributed as dist
from backend import name_of
from oracle import assert_reduced, assert_same, sample

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


def message(rank: int, length: int) -> torch.Tensor:
    return sample(rank, (length,), torch.uint8)


def exchange(sizes: list[tuple[int, int]]) -> None:
    """all_to_all of bytes: rank r has sizes[r] for the other, and half as many for itself."""
    mine = dist.get_rank()
    for pair in sizes:
        splits = [[pair[r] // 2 if d == r else pair[r] for d in range(2)] for r in range(2)]
        given = torch.cat([message(2 * mine + d, splits[mine][d]) for d in range(2)])
        coming = [splits[r][mine] for r in range(2)]
        output = torch.full((sum(coming),), 7, dtype=torch.uint8)
        dist.all_to_all_single(output, given, coming, splits[mine])
        assert_same(output, torch.cat([message(2 * r + mine, coming[r]) for r in range(2)]))
        assert_same(given, torch.cat([message(2 * mine + d, splits[mine][d]) for d in range(2)]))


def gather(lengths: list[int]) -> None:
    for length in lengths:
        outputs = [torch.empty(length, dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(outputs, message(dist.get_rank(), length))
        for rank, output in enumerate(outputs):
            assert_same(output, message(rank, length))


def reduce(lengths: list[int], dtype: torch.dtype) -> None:
    mine = dist.get_rank()
    for length in lengths:
        inputs = [[sample(2 * r + d, (length // 8,), dtype) for d in range(2)] for r in range(2)]
        output = torch.empty(length // 8, dtype=dtype)
        dist.reduce_scatter(output, inputs[mine])
        assert_reduced(output, [row[mine] for row in inputs], "SUM")


def test_all_to_all(world):
    world(2).run(exchange, [(length, length) for length in LENGTHS])


def test_all_to_all_of_unlike_lengths(world):
    world(2).run(exchange, [pair for one in UNLIKE for pair in (one, one[::-1])])


def test_all_gather(world):
    world(2).run(gather, LENGTHS)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float, torch.complex128], ids=name_of
)
def test_reduce_scatter(world, dtype):
    scale = 8 // dtype.itemsize if dtype.itemsize < 8 else 1
    lengths = [length * scale for length in LENGTHS[:-5]]
    world(2).run(reduce, lengths, dtype)
