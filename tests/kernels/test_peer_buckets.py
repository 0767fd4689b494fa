"""All-reduces of buckets in the peers' memory into tensors: the oracle's bits, wherever tensors lie."""

import random
import time
from typing import Any

import kernel_oracle
import peer_ranks
import pytest
import torch
from kernel_cases import assert_measured
from on_ranks import on_ranks
from peer_ranks import Case, assert_same, here
from suite_rules import full

from fastcoll.buckets import PIECE, BucketLayout
from fastcoll.kernels.bucket_all_reduce import BucketAllReduce
from fastcoll.kernels.flatten import Flatten

SIZES = (1, 40, 8201, 16, 0, 300, 7, 7777)
CASES = [("sum", 1.0, 0), ("avg", 0.5, 1), ("avg", 2.0, 3), ("avg", 1.0, 1), ("sum", 1.0, 2)]
"""Operation, factor, and how far tensors begin behind an aligned address. Every other one is measured."""


def opened(channels: int = 3, seconds: float = peer_ranks.SECONDS) -> tuple[Any, Any, Any]:
    buffers = peer_ranks.open_buffers(channels, 1024, 4, 512, seconds=seconds)
    messages = peer_ranks.mapped("message", 1 << 18)
    begins = torch.tensor([message.data_ptr() for message in messages])
    return buffers, messages, begins


def at_offsets(sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    """Tensors that begin `offset` elements behind multiples of 16 bytes."""
    return [torch.full((size + offset,), 7, dtype=dtype)[offset:] for size in sizes]


PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize(
    ("size", "channels", "wire", "dtype"),
    [
        (3, 3, *PAIRS[1]),
        (2, 1, *PAIRS[0]),  # more blocks of a channel than are fetched at once
        *(full(2, 3, *pair) for pair in PAIRS[2:]),
    ],
)
@on_ranks(world="interpreted", init=False)
def test_the_oracles_bits(size, channels, wire, dtype):
    buffers, messages, begins = opened(channels)
    ranks, rank = size, here().rank
    pauses = random.Random(10 * ranks + rank)
    layout = BucketLayout(SIZES, 16)
    flatten = Flatten(layout, dtype, wire, "cpu")
    reduce = BucketAllReduce(layout, wire, dtype, buffers, begins)
    measure = BucketAllReduce(layout, wire, dtype, buffers, begins, measures=True)
    squares = peer_ranks.mapped("squares", 8 * layout.blocks(PIECE))
    own = squares[rank].view(torch.float64)
    bucket = messages[rank][: layout.elements * wire.itemsize].view(wire)
    for number, (op, scale, offset) in enumerate(CASES):
        inputs = []
        for each in range(ranks):
            seed = 3 * (ranks + number) + 1 + each
            case = Case("all_reduce", "one_shot", dtype, 0, op=op, seed=seed)
            inputs.append([peer_ranks.values_of(case, at, size) for at, size in enumerate(SIZES)])
        sources = at_offsets(SIZES, dtype, offset)
        for source, given in zip(sources, inputs[rank], strict=True):
            source.copy_(given)
        outs = at_offsets(SIZES, dtype, offset) if number % 2 else sources
        launch = reduce.prepare(outs, op=op, scale=scale)
        if number % 2 == 0:
            launch = measure.prepare(outs, op=op, scale=scale, squares=own.data_ptr())
        for _ in range(1 + number % 2):  # prepared launches are repeated
            for source, given in zip(sources, inputs[rank], strict=True):
                source.copy_(given)
            if pauses.random() < 0.4:
                time.sleep(pauses.random() * 0.02)
            flatten.prepare(sources, bucket)()
            launch()
            bucket.fill_(77)  # at once: a peer that still reads it would get wrong sums
            buffers.check()
            for out, given in zip(outs, zip(*inputs, strict=True), strict=True):
                expected = kernel_oracle.all_reduce(
                    given, op, scale, None if wire == dtype else wire
                )
                assert_same(out, expected, f"rank {rank}, case {number}")
        if number % 2 == 0:
            assert_measured(own, outs, layout, PIECE)
            here().meet(f"measured {number}")
            assert all(torch.equal(own, other.view(torch.float64)) for other in squares)
            here().meet(f"compared {number}")
        # Another algorithm in between, on the first channel.
        x = torch.full((300,), 1.0 + rank)
        peer_ranks.prepare("two_shot", "all_reduce", x, x, buffers)()
        assert torch.all(x == ranks * (ranks + 1) / 2)


@on_ranks(3, world="interpreted", init=False)
def test_a_rank_that_never_launches_is_named():
    absent = 2
    buffers, messages, begins = opened(2, 2.0)
    layout = BucketLayout((20, 9000), 16)
    reduce = BucketAllReduce(layout, torch.float32, torch.float32, buffers, begins)
    messages[here().rank].view(torch.float32).fill_(1.0)
    outs = [torch.full((size,), -1.0) for size in layout.sizes]
    launch = reduce.prepare(outs)
    here().meet("launch")
    if here().rank != absent:
        launch()
        launch()  # touches nothing
        peer, step, _, _ = peer_ranks.fault_of(buffers)
        assert (peer, step) == (absent, 1)
        assert all(torch.all(out == -1) for out in outs)
    here().meet("noticed")


@on_ranks(1, world="interpreted", init=False)
def test_closed_buffers_are_refused():
    buffers, _, begins = opened()
    reduce = BucketAllReduce(
        BucketLayout((20, 30), 16), torch.float32, torch.float32, buffers, begins
    )
    tensors = [torch.zeros(20), torch.zeros(30)]
    buffers.close()
    with pytest.raises(RuntimeError, match="expected open buffers, got closed ones"):
        reduce.prepare(tensors)
