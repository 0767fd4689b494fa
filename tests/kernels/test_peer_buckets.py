"""All-reduces of buckets in the peers' memory into tensors: the oracle's bits, wherever tensors lie."""

import random
import time
from typing import Any

import kernel_oracle
import peer_ranks
import pytest
import torch
from peer_ranks import Case, assert_same, barrier, here
from world import Worlds

SIZES = (1, 40, 8201, 16, 0, 300, 7, 7777)
CASES = [
    ("sum", 1.0, True, None, 0),
    ("avg", 0.5, False, 1, 1),
    ("max", 1.0, True, 2, 3),
    ("product", 2.0, False, 3, 0),
    ("avg", 1.0, True, None, 1),
    ("sum", 1.0, True, 1, 2),  # more blocks of each rank's than are fetched at once
]
"""Operation, factor, whether ranks reduce shares, channels, and how far tensors begin behind an aligned address."""


def opened(modules: Any, channels: int = 3, spins: int = peer_ranks.SPINS) -> tuple[Any, Any, Any]:
    buffers = peer_ranks.open_buffers(modules.peers.PeerLayout(channels, 1024, 4, 512), spins)
    messages = peer_ranks.mapped("message", 1 << 18)
    registered = modules.Registered.at([message.data_ptr() for message in messages], "cpu")
    return buffers, messages, registered


def at_offsets(sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    """Tensors that begin `offset` elements behind multiples of 16 bytes."""
    return [torch.full((size + offset,), 7, dtype=dtype)[offset:] for size in sizes]


def played(wire: torch.dtype, dtype: torch.dtype, seed: int) -> int:
    from fastcoll.buckets import BucketLayout

    modules = peer_ranks.interpret()
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce
    from fastcoll.kernels.flatten import Flatten

    buffers, messages, registered = opened(modules)
    ranks, rank = here().size, here().rank
    pauses = random.Random(10 * seed + rank)
    layout = BucketLayout(SIZES, 16)
    flatten = Flatten(layout, dtype, wire, "cpu")
    reduce = BucketAllReduce(layout, wire, dtype, buffers, registered)
    bucket = messages[rank][: layout.elements * wire.itemsize].view(wire)
    compared = 0
    for number, (op, scale, shares, channels, offset) in enumerate(CASES):
        inputs = []
        for each in range(ranks):
            case = Case(
                "all_reduce", "one_shot", dtype, 0, op=op, seed=3 * (seed + number) + 1 + each
            )
            inputs.append([peer_ranks.values_of(case, at, size) for at, size in enumerate(SIZES)])
        sources = at_offsets(SIZES, dtype, offset)
        for source, given in zip(sources, inputs[rank], strict=True):
            source.copy_(given)
        outs = at_offsets(SIZES, dtype, offset) if number % 2 else sources
        launch = reduce.prepare(outs, op=op, scale=scale, shares=shares, channels=channels)
        for _ in range(1 + number % 2):  # prepared launches are repeated
            for source, given in zip(sources, inputs[rank], strict=True):
                source.copy_(given)
            if pauses.random() < 0.4:
                time.sleep(pauses.random() * 0.02)
            flatten(sources, bucket)
            launch()
            bucket.fill_(77)  # at once: a peer that still reads it would get wrong sums
            buffers.check()
            for out, given in zip(outs, zip(*inputs, strict=True), strict=True):
                expected = kernel_oracle.all_reduce(
                    given, op, scale, None if wire == dtype else wire
                )
                assert_same(out, expected, f"rank {rank}, case {number}")
                compared += out.numel()
        # Another algorithm in between, on other channels.
        x = torch.full((300,), 1.0 + rank)
        modules.two_shot.all_reduce(x, x, buffers, channels=1 + number % 3)
        assert torch.all(x == ranks * (ranks + 1) / 2)
    return compared


PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(
    ("ranks", "wire", "dtype"),
    [
        (3, *PAIRS[1]),
        pytest.param(1, *PAIRS[0], marks=pytest.mark.full),
        *(pytest.param(2, *pair, marks=pytest.mark.full) for pair in PAIRS[2:]),
    ],
)
def test_the_oracles_bits(
    ranks: int, wire: torch.dtype, dtype: torch.dtype, interpreted: Worlds
) -> None:
    compared = interpreted(ranks).run(played, wire, dtype, ranks, init=False)
    assert compared == [9 * sum(SIZES)] * ranks


def without_rank(absent: int, shares: bool) -> Any:
    from fastcoll.buckets import BucketLayout

    modules = peer_ranks.interpret()
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce

    buffers, messages, registered = opened(modules, 2, 300)
    layout = BucketLayout((20, 9000), 16)
    reduce = BucketAllReduce(layout, torch.float32, torch.float32, buffers, registered)
    messages[here().rank].view(torch.float32).fill_(1.0)
    outs = [torch.full((size,), -1.0) for size in layout.sizes]
    launch = reduce.prepare(outs, shares=shares)
    barrier("launch")
    found = None
    if here().rank != absent:
        launch()
        launch()  # touches nothing
        try:
            buffers.check()
        except modules.peers.PeerFault as fault:
            found = fault.peer, fault.step
        assert all(torch.all(out == -1) for out in outs)
    barrier("noticed")
    buffers.reset()
    buffers.spins = peer_ranks.SPINS
    barrier("reset")
    reduce.prepare(outs, shares=shares)()
    buffers.check()
    assert all(torch.all(out == here().size) for out in outs)
    return found


@pytest.mark.parametrize("shares", [False, True])
def test_a_rank_that_never_launches_is_named_and_a_reset_mends_it(
    shares: bool, interpreted: Worlds
) -> None:
    assert interpreted(3).run(without_rank, 2, shares, init=False) == [(2, 1), (2, 1), None]


def refused() -> None:
    from fastcoll.buckets import BucketLayout

    modules = peer_ranks.interpret()
    from fastcoll.kernels.bucket_all_reduce import BucketAllReduce

    buffers, _, registered = opened(modules)
    layout = BucketLayout((20, 30), 16)
    with pytest.raises(TypeError, match="float32 -> bfloat16"):
        BucketAllReduce(layout, torch.float32, torch.bfloat16, buffers, registered)
    with pytest.raises(ValueError, match="multiples of 16"):
        BucketAllReduce(BucketLayout((20, 30)), torch.float32, torch.float32, buffers, registered)
    reduce = BucketAllReduce(layout, torch.float32, torch.float32, buffers, registered)
    x = torch.zeros(60)
    with pytest.raises(ValueError, match="apart"):
        reduce.prepare([x[:20], x[10:40]])
    with pytest.raises(ValueError, match="op"):
        reduce.prepare([x[:20], x[20:50]], op="xor")
    with pytest.raises(ValueError, match="channels"):
        reduce.prepare([x[:20], x[20:50]], channels=4)
    launch = reduce.prepare([x[:20], x[20:50]])
    buffers.close()
    for refusing in (launch, lambda: reduce.prepare([x[:20], x[20:50]])):
        with pytest.raises(RuntimeError, match="expected open buffers, got closed ones"):
            refusing()


def test_what_cannot_be_is_refused(interpreted: Worlds) -> None:
    interpreted(1).run(refused, init=False)
