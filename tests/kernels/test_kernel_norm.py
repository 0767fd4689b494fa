"""The norm and what clipping needs, against PyTorch in float64."""

import math

import pytest
import torch

from fastcoll.kernels.norm import prepare_norm

EPSILON = 1e-6


def measured(squares, max_norm):
    """Returns norm, divisor and found_inf of sums of squares."""
    result = torch.full((2,), 7.0, dtype=torch.float64, device=squares.device)
    places = squares.data_ptr(), squares.numel(), result.data_ptr()
    prepare_norm(*places, max_norm, EPSILON, squares.device)()
    divisor, found_inf = result[1:].view(torch.float32).tolist()
    return result[0].item(), divisor, found_inf


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6, math.inf])
def test_the_norm_and_the_divisor(device, count, max_norm):
    generator = torch.Generator().manual_seed(count)
    squares = torch.rand(count, generator=generator, dtype=torch.float64)
    norm, divisor, found_inf = measured(squares.to(device), max_norm)
    expected = squares.sum().sqrt()
    assert norm == pytest.approx(expected.item(), rel=1e-14)
    wanted = ((norm + EPSILON) / torch.tensor(max_norm, dtype=torch.float64)).clamp(min=1.0)
    assert (divisor, found_inf) == (wanted.float().item(), 0.0)


def test_squares_of_the_largest_float32_do_not_overflow(device):
    largest = torch.finfo(torch.float32).max
    squares = torch.full((3000,), largest**2, dtype=torch.float64, device=device)
    norm, _, found_inf = measured(squares, 1.0)
    assert norm == pytest.approx(largest * math.sqrt(3000)) and found_inf == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1499])
def test_what_is_not_finite_is_found(device, value, at):
    squares = torch.ones(1500, dtype=torch.float64, device=device)
    squares[at] = value
    norm, _, found_inf = measured(squares, 1.0)
    assert not math.isfinite(norm) and found_inf == 1.0
