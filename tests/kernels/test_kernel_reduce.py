"""Reduce against its oracle, bit for bit."""

import functools

import kernel_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, SCALES, SLOW, at_offset, numbers, same_numbers
from oracle import folded
from torch import Tensor

from fastcoll.kernels.reduce import prepare_reduce

KEYS = [
    *((dtype, "SUM") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    (torch.float32, "AVG"),
    (torch.bfloat16, "AVG"),
    (torch.float64, "AVG"),
]


def key_id(key: object) -> str:
    return str(key).replace("torch.", "")


def reduce(inputs: list[Tensor], output: Tensor, op: str = "SUM", scale: float = 1.0) -> None:
    addresses = [tensor.data_ptr() for tensor in inputs]
    count, dtype, device = output.numel(), output.dtype, output.device
    prepare_reduce(addresses, output.data_ptr(), count, dtype, device, op=op, scale=scale)()


@pytest.mark.parametrize("key", KEYS, ids=key_id)
@settings(SLOW, max_examples=6)
@given(
    size=st.one_of(st.sampled_from([0, 1, 1024, 4096, 8192]), st.integers(0, 9000)),
    inputs=st.one_of(st.integers(1, 9), st.integers(10, 24)),
    offset=st.integers(0, 3),
    scale=SCALES,
    seed=CASES,
)
def test_reduce_is_the_oracle(device, key, size, inputs, offset, scale, seed) -> None:
    dtype, op = key
    buffers = [
        at_offset(numbers(size, dtype, seed + rank), offset * (rank % 2), device)
        for rank in range(inputs)
    ]
    expected = kernel_oracle.all_reduce([each.cpu() for each in buffers], op.lower(), scale)
    space = torch.full((size + 7,), 7, dtype=dtype, device=device)
    reduce(buffers, space[:size], op, scale)
    assert same_numbers(space[:size], expected)
    assert bool((space[size:] == 7).all())


def test_sums_are_taken_by_the_tree_and_rounded_once(device: torch.device) -> None:
    """(2^24 + 1) + (1 - 2^24) = 1 in float32; from left to right it is 0."""
    inputs = [
        torch.full((5000,), value, device=device) for value in (2.0**24, 1.0, 1.0, -(2.0**24))
    ]
    out = torch.zeros(5000, device=device)
    reduce(inputs, out)
    assert out.unique().tolist() == [1.0]
    # In bfloat16 256 + 1 is 256.
    inputs = [torch.full((5000,), value, device=device).bfloat16() for value in (256, 1, 1)]
    rounded = torch.zeros(5000, device=device, dtype=torch.bfloat16)
    reduce(inputs, rounded)
    assert rounded.unique().tolist() == [258.0]


@pytest.mark.parametrize("many", [25, 35, 130])
def test_very_many_inputs_are_summed_by_the_tree_too(device: torch.device, many: int) -> None:
    inputs = [torch.randn(1100, device=device) for _ in range(many)]
    out = torch.zeros(1100, device=device)
    reduce(inputs, out)
    assert same_numbers(out, folded(inputs, torch.add))
    blocks = [folded(inputs[first : first + 8], torch.add) for first in range(0, many, 8)]
    assert not torch.equal(out, functools.reduce(torch.add, blocks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_factor_of_each_input_is_rounded_before_the_sum(device: torch.device, dtype) -> None:
    """Not fused with the addition, which would round once."""
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [torch.randn(1100, dtype=torch.float64).to(dtype) for _ in range(5)]
    factors = torch.tensor([1 / 3, 0.1, -0.7, 1.0, 2.3], dtype=torch.float64, device=device)
    terms = [each.to(wide) * factors[i].cpu().to(wide) for i, each in enumerate(inputs)]
    out = torch.zeros(1100, dtype=dtype, device=device)
    given = [each.to(device) for each in inputs]
    addresses = [each.data_ptr() for each in given]
    prepare_reduce(
        addresses, out.data_ptr(), 1100, dtype, device, op="PREMUL_SUM", factors=factors.data_ptr()
    )()
    assert same_numbers(out, folded(terms, torch.add).to(dtype))


def test_the_output_may_be_one_of_the_inputs(device: torch.device) -> None:
    inputs = [torch.randn(9001, device=device) for _ in range(3)]
    expected = kernel_oracle.all_reduce(inputs)
    reduce(inputs, inputs[1])
    assert same_numbers(inputs[1], expected)


def test_an_average_is_the_true_quotient_of_the_sum(device: torch.device) -> None:
    """Most quotients by 3 differ from the products with the float32 next to 1/3."""
    inputs = [torch.randn(4096, device=device) for _ in range(3)]
    total = (inputs[0] + inputs[1] + inputs[2]).double().cpu()
    quotients = (total / 3).float()
    assert not torch.equal(quotients, total.float() * torch.tensor(1 / 3))
    out = torch.zeros(4096, device=device)
    reduce(inputs, out, "AVG")
    assert same_numbers(out, quotients)
