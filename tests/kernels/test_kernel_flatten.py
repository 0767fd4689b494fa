"""Flatten and unflatten against their oracles, bit for bit."""

import kernel_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    CASES,
    SCALES,
    SIZES,
    SLOW,
    assert_measured,
    at_offset,
    numbers,
    same_numbers,
)

from fastcoll.buckets import BLOCK, BucketLayout
from fastcoll.kernels.flatten import Flatten, Unflatten

PAIRS = list(Flatten.table)
BACK = list(Unflatten.table)
FILLER = 77.0


def test_every_dtype_goes_over_its_own_wire_and_float32_over_narrower_ones():
    narrow = [torch.float16, torch.bfloat16]
    wanted = {(dtype, dtype) for dtype in (torch.float32, torch.float64, *narrow)}
    wanted |= {(torch.float32, wire) for wire in narrow}
    assert set(PAIRS) == wanted
    assert {(dtype, wire) for wire, dtype in BACK} == wanted


def pair_id(pair: object) -> str:
    return str(pair).replace("torch.", "")


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
@settings(SLOW, max_examples=5)
@given(sizes=SIZES, offset=st.integers(0, 17), scale=SCALES, seed=CASES)
def test_flatten_is_the_oracle(device, pair, sizes, offset, scale, seed):
    dtype, wire = pair
    tensors = [
        at_offset(numbers(size, dtype, seed + index), offset if index % 2 else 0, device)
        for index, size in enumerate(sizes)
    ]
    layout = BucketLayout(sizes, 1 + seed % 16)
    memory = torch.full((layout.elements + 16,), FILLER, device=device).to(wire)
    bucket = memory[: layout.elements]
    Flatten(layout, dtype, wire, device).prepare(tensors, bucket, scale)()
    expected = kernel_oracle.flatten([tensor.cpu() for tensor in tensors], layout, wire, scale)
    for got, want in zip(layout.views(bucket), expected, strict=True):
        assert same_numbers(got, want)
    untouched = torch.ones(len(memory), dtype=torch.bool)
    for begin, size in zip(layout.offsets, layout.sizes, strict=True):
        untouched[begin : begin + size] = False
    filler = torch.full((1,), FILLER).to(wire).float()
    assert bool((memory.cpu().float()[untouched] == filler).all())


@pytest.mark.parametrize("pair", BACK, ids=pair_id)
@settings(SLOW, max_examples=5)
@given(sizes=SIZES, offset=st.integers(0, 17), scale=SCALES, seed=CASES)
def test_unflatten_is_the_oracle(device, pair, sizes, offset, scale, seed):
    wire, dtype = pair
    layout = BucketLayout(sizes, 1 + seed % 16)
    bucket = at_offset(numbers(layout.elements, wire, seed), offset, device)
    tensors = [
        at_offset(numbers(size, dtype, seed + index), index % 3, device)
        for index, size in enumerate(sizes, 1)
    ]
    expected = kernel_oracle.unflatten(bucket.cpu(), layout, dtype, scale)
    Unflatten(layout, wire, dtype, device).prepare(bucket, tensors, scale)()
    for got, want in zip(tensors, expected, strict=True):
        assert same_numbers(got, want)


@pytest.mark.parametrize("pair", BACK, ids=pair_id)
@settings(SLOW, max_examples=5)
@given(sizes=SIZES, offset=st.integers(0, 3), scale=SCALES, seed=CASES)
def test_unflatten_measures_what_it_writes(device, pair, sizes, offset, scale, seed):
    """The rounded values, in float64; and with the same bits, wherever the tensors begin."""
    wire, dtype = pair
    layout = BucketLayout(sizes, 16)
    ordinary = seed % 2 == 0
    bucket = at_offset(numbers(layout.elements, wire, seed, ordinary), 0, device)
    plan = Unflatten(layout, wire, dtype, device, measures=True)
    plain = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    Unflatten(layout, wire, dtype, device).prepare(bucket, plain, scale)()
    measured = []
    for shift in (0, offset):
        tensors = [at_offset(torch.zeros(size).to(dtype), shift, device) for size in sizes]
        squares = torch.full((layout.blocks(BLOCK),), 7.0, dtype=torch.float64, device=device)
        plan.prepare(bucket, tensors, scale, squares.data_ptr())()
        assert all(same_numbers(got, want) for got, want in zip(tensors, plain, strict=True))
        if squares.numel():
            assert_measured(squares, tensors, layout, BLOCK)
        measured.append(squares)
    assert same_numbers(*measured)


def test_float64_is_scaled_in_float64(device):
    tensors = [torch.tensor([1.0, 3.0, 1e300], dtype=torch.float64, device=device)]
    layout = BucketLayout([len(tensors[0])])
    bucket = layout.new_bucket(torch.float64, device)
    Flatten(layout, torch.float64, torch.float64, device).prepare(tensors, bucket, 1 / 3)()
    assert same_numbers(bucket, tensors[0] * (1 / 3))


def test_a_prepared_launch_reads_the_tensors_as_they_are_then(device):
    tensors = [torch.ones(5000, device=device), torch.ones(3, device=device)]
    layout = BucketLayout([5000, 3], 8)
    bucket = layout.new_bucket(torch.bfloat16, device)
    launch = Flatten(layout, torch.float32, torch.bfloat16, device).prepare(tensors, bucket)
    for value in (2.0, 3.0):
        tensors[0].fill_(value)
        launch()
        assert layout.views(bucket)[0].unique().tolist() == [value]


def test_a_prepared_launch_outlives_another_preparation(device):
    layout = BucketLayout([5000])
    plan = Flatten(layout, torch.float32, torch.float32, device)
    first, second = (torch.full((5000,), value, device=device) for value in (1.0, 2.0))
    one, two = (layout.new_bucket(torch.float32, device) for _ in range(2))
    launch = plan.prepare([first], one)
    plan.prepare([second], two)()
    launch()
    assert one.unique().tolist() == [1.0] and two.unique().tolist() == [2.0]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_nothing_to_move_is_no_launch(device, sizes):
    layout = BucketLayout(sizes)
    tensors = [torch.empty(0, device=device) for _ in sizes]
    bucket = torch.empty(0, device=device)
    Flatten(layout, torch.float32, torch.float32, device).prepare(tensors, bucket)()
