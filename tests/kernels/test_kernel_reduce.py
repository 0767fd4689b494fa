"""Reduce against its oracle, bit for bit, from and to flat buckets and scattered tensors."""

import kernel_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, SCALES, SIZES, SLOW, at_offset, numbers, same_numbers

from fastcoll.buckets import BucketLayout
from fastcoll.kernels import Reduce, Statistics, reduce

KEYS = [
    *((dtype, "SUM") for (dtype,) in reduce._table(reduce.DEFAULT_BLOCKING)),
    (torch.float32, "AVG"),
    (torch.bfloat16, "AVG"),
]


def key_id(key: object) -> str:
    return str(key).replace("torch.", "")


@pytest.mark.parametrize("key", KEYS, ids=key_id)
@settings(SLOW, max_examples=3)
@given(
    sizes=SIZES,
    inputs=st.integers(1, 9),
    kind=st.sampled_from(["flat", "addresses", "scattered"]),
    to=st.sampled_from(["flat", "scattered"]),
    offset=st.integers(0, 3),
    scale=SCALES,
    seed=CASES,
)
def test_reduce_is_the_oracle(device, key, sizes, inputs, kind, to, offset, scale, seed) -> None:
    dtype, op = key
    layout = BucketLayout(sizes, 1 + seed % 16)
    buckets = [
        at_offset(numbers(layout.elements, dtype, seed + rank), offset * (rank % 2), device)
        for rank in range(inputs)
    ]
    parts = list(zip(*(layout.views(bucket.cpu()) for bucket in buckets), strict=True))
    expected = [kernel_oracle.reduce(part, op, scale) for part in parts]
    given_inputs = {
        "flat": buckets,
        "addresses": [bucket.data_ptr() for bucket in buckets],
        "scattered": [[part.clone() for part in layout.views(bucket)] for bucket in buckets],
    }[kind]
    output = layout.new_bucket(dtype, device)
    targets = [torch.zeros_like(part) for part in layout.views(output)]
    plan = Reduce(layout, inputs, dtype, device, op)
    plan(given_inputs, output if to == "flat" else targets, scale)
    for got, want in zip(layout.views(output) if to == "flat" else targets, expected, strict=True):
        assert same_numbers(got, want)


def test_sums_are_taken_in_input_order_and_rounded_once(device: torch.device) -> None:
    # In bfloat16 256 + 1 is 256; in another order of float32 sums the ones would be lost or kept otherwise.
    inputs = [
        torch.full((5000,), value, device=device) for value in (2.0**24, 1.0, 1.0, -(2.0**24))
    ]
    layout = BucketLayout([5000])
    out = torch.zeros(5000, device=device)
    Reduce(layout, 4, torch.float32, device)(inputs, out)
    assert out.unique().tolist() == [0.0]
    inputs = [torch.full((5000,), value, device=device).bfloat16() for value in (256, 1, 1)]
    rounded = torch.zeros(5000, device=device, dtype=torch.bfloat16)
    Reduce(layout, 3, torch.bfloat16, device)(inputs, rounded)
    assert rounded.unique().tolist() == [258.0]


def test_the_output_may_be_one_of_the_inputs(device: torch.device) -> None:
    inputs = [torch.randn(9001, device=device) for _ in range(3)]
    expected = kernel_oracle.reduce(inputs)
    layout = BucketLayout([9001])
    Reduce(layout, 3, torch.float32, device)(inputs, inputs[1])
    assert same_numbers(inputs[1], expected)


def test_avg_takes_a_scale_from_the_device(device: torch.device) -> None:
    inputs = [torch.randn(100, device=device) for _ in range(3)]
    scale = torch.tensor(0.3, device=device)
    out = torch.zeros(100, device=device)
    Reduce(BucketLayout([100]), 3, torch.float32, device, "AVG")(inputs, out, scale)
    assert same_numbers(out, kernel_oracle.reduce(inputs, "AVG", scale))


def test_an_average_is_the_true_quotient_of_the_sum(device: torch.device) -> None:
    """Most quotients by 3 differ from the products with the float32 next to 1/3."""
    inputs = [torch.randn(4096, device=device) for _ in range(3)]
    total = (inputs[0] + inputs[1] + inputs[2]).double().cpu()
    quotients = (total / 3).float()
    assert not torch.equal(quotients, total.float() * torch.tensor(1 / 3))
    out = torch.zeros(4096, device=device)
    Reduce(BucketLayout([4096]), 3, torch.float32, device, "AVG")(inputs, out)
    assert same_numbers(out, quotients)


def test_norm_is_of_the_result(device: torch.device) -> None:
    inputs = [torch.ones(10000, dtype=torch.bfloat16, device=device) for _ in range(4)]
    plan = Reduce(BucketLayout([10000]), 4, torch.bfloat16, device)
    statistics = Statistics(plan.programs, device)
    out = torch.zeros(10000, dtype=torch.bfloat16, device=device)
    plan(inputs, out, 0.5, statistics)
    assert statistics.sum_of_squares.item() == 10000 * 4.0
    assert statistics.nonfinite.item() == 0.0
