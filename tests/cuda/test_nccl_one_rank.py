"""Sums of one rank with a factor: whole with every NCCL, also with those whose kernel drops the end of a message."""

from datetime import timedelta

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from nccl_ranks import Tensors, communicator, on_stand_in, stand_in
from nccl_recorder import RecordedNccl

from fastcoll._load_cuda import CUDA

BASE = 0x10000


def written(count: int, itemsize: int) -> int:
    """How many elements NCCL's kernel writes, by its own arithmetic before 2.29.7."""
    blocks = min(32, -(-count * itemsize // (16 << 10)))
    pack = 16 // itemsize
    return min(count, blocks * (-(-(count // blocks) // pack) * pack))


def pieces(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Where the calls for a message of one rank begin, and their elements."""
    nccl = RecordedNccl(version=22906, ranks=1)
    dtype = {1: "float8_e5m2", 2: "bfloat16", 4: "float32", 8: "float64"}[itemsize]
    nccl.issue("all_reduce", (BASE, count), (BASE, count), "PREMUL_SUM", dtype)
    assert all(one[0] == one[1] for _, one in nccl.calls)
    return [((one[0] - BASE) // itemsize, one[2]) for _, one in nccl.calls]


@given(st.integers(1, 1 << 22), st.sampled_from([1, 2, 4, 8]))
@example(32 * 8192 + 1, 2)
@example(8191, 2)
@example(1, 8)
def test_pieces_are_whole(count, itemsize):
    made = pieces(count, itemsize)
    assert [first for first, _ in made] == [0, *[some for _, some in made[:-1]]]
    assert sum(some for _, some in made) == count
    assert all(written(some, itemsize) == some for _, some in made)


def test_a_whole_message_would_not_be():
    assert written(1_024_006, 2) == 1_024_000
    assert pieces(1_024_006, 2) == [(0, 1_024_000), (1_024_000, 6)]
    assert pieces(8192 * 32, 2) == [(0, 8192 * 32)]


COUNT = 100_003


@pytest.mark.parametrize("drops", [True, False])
@on_stand_in(1)
def test_messages_are_called_in_pieces_where_they_must(drops):
    whole, cut, nothing = [COUNT], [98_304, 1699], []
    first, both = (cut, [199_936, 70]) if drops else (whole, [2 * COUNT])
    ways = [first, nothing, first, first, both, whole, nothing]
    counts = []
    with communicator() as made:
        functions = CUDA.NcclFunctions(made.library.address, 22906 if drops else 22907)
        made.calls = CUDA.NcclCalls(functions, made.raw.comm, 1, timedelta(seconds=30))
        x, y = torch.arange(COUNT).float(), torch.zeros(COUNT)
        z = torch.complex(x, -x)
        for source, target, op, factor in (
            (x, y, "AVG", 1), (x, x, "AVG", 1),
            (x, y, "PREMUL_SUM", 2), (x, x, "PREMUL_SUM", 2), (z, z, "PREMUL_SUM", 2), (x, y, "SUM", 1),
            (x, x, "SUM", 1),
        ):  # fmt: skip
            expected = source * factor
            for what in ("all_reduce", "reduce_scatter", "reduce"):
                given = source.clone()
                into = given if target is source else torch.zeros_like(target)
                stand_in.clear()
                Tensors(made).reduce(what, given, into, op, float(factor))
                assert torch.equal(into, expected), (op, what)
                made_calls = stand_in.calls()
                names = ("allReduce", "reduce", "reduceScatter")
                counts.append([values["count"] for name, values in made_calls if name in names])
    assert counts == [way for way in ways for _ in range(3)]


def test_several_ranks_have_another_kernel():
    nccl = RecordedNccl(version=22906, ranks=2)
    nccl.issue("all_reduce", (BASE, COUNT), (BASE, COUNT), "PREMUL_SUM")
    assert [one[2] for _, one in nccl.calls] == [COUNT]
