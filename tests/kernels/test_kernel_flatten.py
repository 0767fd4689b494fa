"""Flatten and unflatten against their oracles, bit for bit."""

import kernel_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, SCALES, SIZES, SLOW, at_offset, numbers, same_numbers

from fastcoll.buckets import BucketLayout
from fastcoll.kernels import Flatten, Statistics, Unflatten, flatten, unflatten

PAIRS = list(flatten._table(flatten.DEFAULT_BLOCKING))
BACK = list(unflatten._table(unflatten.DEFAULT_BLOCKING))
FILLER = 77.0


def test_every_dtype_goes_over_its_own_wire_and_float32_over_narrower_ones() -> None:
    narrow = [torch.float16, torch.bfloat16]
    wanted = {(dtype, dtype) for dtype in (torch.float32, torch.float64, *narrow)}
    wanted |= {(torch.float32, wire) for wire in narrow}
    assert set(PAIRS) == wanted
    assert {(dtype, wire) for wire, dtype in BACK} == wanted


def pair_id(pair: object) -> str:
    return str(pair).replace("torch.", "")


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
@settings(SLOW, max_examples=5)
@given(sizes=SIZES, offset=st.integers(0, 17), packed=st.booleans(), scale=SCALES, seed=CASES)
def test_flatten_is_the_oracle(device, pair, sizes, offset, packed, scale, seed) -> None:
    dtype, wire = pair
    tensors = [
        at_offset(numbers(size, dtype, seed + index), offset if index % 2 else 0, device)
        for index, size in enumerate(sizes)
    ]
    layout = BucketLayout([tensor.numel() for tensor in tensors], 1 if packed else 16)
    memory = torch.full((layout.elements + 16,), FILLER, device=device).to(wire)
    bucket = memory[: layout.elements]
    Flatten(layout, dtype, wire, device)(tensors, bucket, scale)
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
@given(sizes=SIZES, offset=st.integers(0, 17), accumulate=st.booleans(), scale=SCALES, seed=CASES)
def test_unflatten_is_the_oracle(device, pair, sizes, offset, accumulate, scale, seed) -> None:
    wire, dtype = pair
    layout = BucketLayout(sizes, 1 + seed % 16)
    bucket = at_offset(numbers(layout.elements, wire, seed), offset, device)
    tensors = [
        at_offset(numbers(size, dtype, seed + index), index % 3, device)
        for index, size in enumerate(sizes, 1)
    ]
    before = [tensor.cpu() for tensor in tensors]
    expected = kernel_oracle.unflatten(bucket.cpu(), layout, before, scale, accumulate)
    Unflatten(layout, wire, dtype, device)(bucket, tensors, scale, accumulate)
    for got, want in zip(tensors, expected, strict=True):
        assert same_numbers(got, want)


def test_a_scale_on_the_device_is_read_when_the_kernel_runs(device: torch.device) -> None:
    tensors = [torch.arange(10.0, device=device)]
    layout = BucketLayout([10])
    bucket = layout.new_bucket(torch.float32, device)
    scale = torch.tensor(2.0, device=device)
    launch = Flatten(layout, torch.float32, torch.float32, device).prepare(tensors, bucket, scale)
    scale.fill_(0.1)
    launch()
    assert same_numbers(bucket, tensors[0] * scale)


def test_float64_is_scaled_in_float64(device: torch.device) -> None:
    tensors = [torch.tensor([1.0, 3.0, 1e300], dtype=torch.float64, device=device)]
    layout = BucketLayout([3])
    bucket = layout.new_bucket(torch.float64, device)
    Flatten(layout, torch.float64, torch.float64, device)(tensors, bucket, 1 / 3)
    assert same_numbers(bucket, tensors[0] * (1 / 3))


def test_a_prepared_launch_reads_the_tensors_as_they_are_then(device: torch.device) -> None:
    tensors = [torch.ones(5000, device=device), torch.ones(3, device=device)]
    layout = BucketLayout([5000, 3], 8)
    bucket = layout.new_bucket(torch.bfloat16, device)
    launch = Flatten(layout, torch.float32, torch.bfloat16, device).prepare(tensors, bucket)
    for value in (2.0, 3.0):
        tensors[0].fill_(value)
        launch()
        assert layout.views(bucket)[0].unique().tolist() == [value]


def test_a_prepared_launch_outlives_another_preparation(device: torch.device) -> None:
    layout = BucketLayout([5000])
    plan = Flatten(layout, torch.float32, torch.float32, device)
    first, second = (torch.full((5000,), value, device=device) for value in (1.0, 2.0))
    one, two = (layout.new_bucket(torch.float32, device) for _ in range(2))
    launch = plan.prepare([first], one)
    plan([second], two)
    launch()
    assert one.unique().tolist() == [1.0] and two.unique().tolist() == [2.0]


def test_dense_tensors_go_in_the_order_of_their_memory(device: torch.device) -> None:
    image = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    layout = BucketLayout([image.numel()])
    bucket = layout.new_bucket(torch.float32, device)
    Flatten(layout, torch.float32, torch.float32, device)([image], bucket)
    assert same_numbers(bucket, image.permute(0, 2, 3, 1).reshape(-1))
    back = torch.zeros_like(image)
    Unflatten(layout, torch.float32, torch.float32, device)(bucket, [back])
    assert torch.equal(back, image)


def test_a_tensor_may_be_scaled_in_its_own_place_of_the_bucket(device: torch.device) -> None:
    layout = BucketLayout([3, 5000, 9])
    bucket = torch.randn(layout.elements, device=device)
    expected = bucket * 0.5
    plan = Flatten(layout, torch.float32, torch.float32, device)
    plan(layout.views(bucket), bucket, 0.5)
    assert same_numbers(bucket, expected)


@settings(SLOW, max_examples=15)
@given(sizes=SIZES, seed=CASES, ordinary=st.booleans())
def test_norm_and_finiteness_are_of_what_is_written(device, sizes, seed, ordinary) -> None:
    layout = BucketLayout(sizes)
    tensors = [
        at_offset(numbers(size, torch.float16, seed + index, ordinary), index % 2, device)
        for index, size in enumerate(sizes)
    ]
    bucket = layout.new_bucket(torch.float16, device)
    plan = Flatten(layout, torch.float16, torch.float16, device)
    statistics = Statistics(plan.programs, device)
    plan(tensors, bucket, 0.25, statistics)
    values = [tensor.float() * 0.25 for tensor in tensors]
    squares, nonfinite = kernel_oracle.statistics(values, layout.views(bucket))
    assert statistics.nonfinite.item() == nonfinite
    if nonfinite:
        assert not statistics.sum_of_squares.isfinite()
    else:
        assert statistics.sum_of_squares.item() == pytest.approx(squares, rel=1e-5, abs=1e-30)
    again = statistics.sum_of_squares.clone()
    plan(tensors, bucket, 0.25, statistics)
    assert same_numbers(statistics.sum_of_squares, again)


def test_unflatten_counts_what_it_accumulates(device: torch.device) -> None:
    layout = BucketLayout([5000, 70])
    bucket = torch.ones(layout.elements, device=device)
    tensors = [torch.full((size,), 2.0, device=device) for size in layout.sizes]
    plan = Unflatten(layout, torch.float32, torch.float32, device)
    statistics = Statistics(plan.programs, device)
    plan(bucket, tensors, 0.5, True, statistics)
    assert statistics.sum_of_squares.item() == 5070 * 2.5**2
    assert statistics.nonfinite.item() == 0.0


def test_an_overflow_to_the_wire_dtype_counts_as_not_finite(device: torch.device) -> None:
    tensors = [torch.tensor([1.0, 70000.0], device=device)]
    layout = BucketLayout([2])
    plan = Flatten(layout, torch.float32, torch.float16, device)
    statistics = Statistics(plan.programs, device)
    plan(tensors, layout.new_bucket(torch.float16, device), 1.0, statistics)
    assert statistics.nonfinite.item() == 1.0
    assert statistics.sum_of_squares.item() == pytest.approx(70000.0**2 + 1, rel=1e-6)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_nothing_to_move_is_no_launch_and_no_norm(device: torch.device, sizes: list[int]) -> None:
    layout = BucketLayout(sizes)
    tensors = [torch.empty(0, device=device) for _ in sizes]
    statistics = Statistics(1, device)
    statistics.sum_of_squares.fill_(5.0)
    bucket = torch.empty(0, device=device)
    plan = Flatten(layout, torch.float32, torch.float32, device)
    assert plan.programs == 0
    plan(tensors, bucket, statistics=statistics)
    assert statistics.sum_of_squares.item() == 0.0
