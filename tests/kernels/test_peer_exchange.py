"""Kernels between ranks against their oracle: in 2, 3 and 4 processes over shared memory, interpreted."""

import itertools
import random

import peer_ranks
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from peer_ranks import Case
from suite_rules import full

PAIRS = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
OPS = ["sum", "avg"]
KINDS = [
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("all_reduce", "ring"),
    ("reduce_scatter", "ring"),
    ("all_gather", "ring"),
]


def any_case(choose: random.Random, in_place: bool = True) -> Case:
    collective, algorithm = choose.choice(KINDS)
    dtype, wire = choose.choice(PAIRS)
    if collective == "all_gather":
        dtype, wire = choose.choice([dtype, torch.uint8, torch.int64, torch.float64]), None
    count = choose.choice([choose.randrange(40), choose.randrange(1200)])
    return Case(
        collective,
        algorithm,
        dtype,
        count,
        wire=wire,
        op=choose.choice(OPS),
        scale=choose.choice([1.0, 0.5, 1 / 3, -2.7]),
        offset=choose.choice([0, 0, 1, 3]),
        in_place=in_place and choose.random() < 0.5,
        seed=choose.randrange(1000),
    )


@pytest.mark.parametrize(("ranks", "calls"), [(3, 5), full(3, 20), full(2, 20), full(4, 20)])
def test_any_calls_in_any_order_on_the_same_buffers(ranks, calls, interpreted):
    @settings(max_examples=settings.default.max_examples // 100, phases=[Phase.generate])
    @given(st.integers(0, 2**32))
    def play(seed: int) -> None:
        choose = random.Random(seed)
        cases = [any_case(choose) for _ in range(calls)]
        interpreted(ranks).run(peer_ranks.play, cases, seed % 97, init=False)

    play()


@pytest.mark.parametrize("size", [3, full(2), full(4)])
@on_ranks(world="interpreted", init=False)
def test_every_type(size):
    kinds = [kind for kind in KINDS if kind[0] != "all_gather"]
    cases = [
        Case(
            collective,
            algorithm,
            dtype,
            count=37 * size + number,
            wire=wire,
            op=OPS[number % len(OPS)],
            scale=0.7,
            seed=number,
        )
        for number, ((collective, algorithm), (dtype, wire)) in enumerate(
            itertools.product(kinds, PAIRS)
        )
    ]
    peer_ranks.play(cases, 5, channels=1)


@pytest.mark.parametrize("size", [3, full(2)])
@on_ranks(world="interpreted", init=False)
def test_messages_of_nothing_and_around_16_elements(size):
    """Some ranks have no share, no chunk or no whole block; a call of nothing moves no counter."""
    cases = [
        Case(collective, algorithm, torch.bfloat16, count, seed=count + 1, in_place=count % 2 == 0)
        for collective, algorithm in KINDS
        for count in (0, 1, 16, 17, 0, 33)
    ]
    peer_ranks.play(cases, 7)


@pytest.mark.parametrize("calls", [4, full(24)])
@pytest.mark.parametrize("collective, algorithm", KINDS)
@on_ranks(3, world="interpreted", init=False)
def test_buffers_serve_many_calls_with_no_barrier(collective, algorithm, calls):
    """Calls of several rounds each, while every rank is late now and then, and one dawdles in launches too."""
    cases = [
        Case(collective, algorithm, torch.float32, count=300 + 7 * number, seed=number + 1)
        for number in range(calls)
    ]
    peer_ranks.play(cases, 11, channels=2, slots=2, slow=1)
