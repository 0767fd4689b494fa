"""What two ranks exchange in place, at the sizes where pieces, lines, blocks and segments end."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import Case, Runner, run_all
from on_ranks import on_ranks

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


def exchanges(sizes: list[tuple[int, int]]) -> list[Case]:
    """all_to_all of bytes: rank r has sizes[r] for the other, and half as many for itself."""
    return [
        Case("all_to_all_single", dtype=torch.uint8, shape=(1,), splits=((a // 2, a), (b, b // 2)))
        for a, b in sizes
    ]


def gathers(lengths: list[int]) -> list[Case]:
    return [Case("all_gather", dtype=torch.uint8, shape=(length,)) for length in lengths]


def reductions(lengths: list[int], dtype: torch.dtype) -> list[Case]:
    """reduce_scatter of so many bytes for each rank, as far as the type allows."""
    return [Case("reduce_scatter", dtype=dtype, shape=(n // dtype.itemsize,)) for n in lengths]


def everything() -> list[Case]:
    """All three, with messages that are cut into many segments."""
    lengths = [LEAST - 1, LEAST, 2 * BLOCK + 1, 100_003]
    alike = [(length, length) for length in lengths]
    sizes = [*alike, (0, LEAST), (20_001, 3), (LEAST - 1, LEAST)]
    return [*exchanges(sizes), *gathers(lengths), *reductions(lengths, torch.bfloat16)]


EDGES = {
    "all_to_all": exchanges([(length, length) for length in LENGTHS]),
    "all_to_all of unlike lengths": exchanges(BOTH_WAYS),
    "all_gather": gathers(LENGTHS),
    **{
        f"reduce_scatter of {dtype}": reductions(LENGTHS[:-5], dtype)
        for dtype in (torch.uint8, torch.bfloat16, torch.float, torch.complex128)
    },
}


@pytest.mark.parametrize("name", EDGES)
@on_ranks(2)
def test_at_every_edge(name):
    run_all(EDGES[name])


@beyond_gloo("has no fastcoll.Options")
@on_ranks(2)
def test_small_rings_and_segments():
    """In the smallest ring, and in segments of a line."""
    import fastcoll
    import fastcoll.tuning

    table = type(fastcoll.tuning.load().table)()  # one of its own: that of load() is everybody's
    table.segment_bytes = 1
    for options in (fastcoll.Options(ring_bytes=16384), fastcoll.Options(tuning=table)):
        group = dist.new_group(backend="fastcoll", pg_options=options)
        for case in everything():
            Runner(case, group).check()
        dist.destroy_process_group(group)
