"""Conversions inside kernels against torch's: every 16-bit pattern, and float32 at every boundary."""

import pytest
import torch
from kernel_cases import same_numbers
from torch import Tensor

from fastcoll.buckets import BucketLayout
from fastcoll.kernels.flatten import Flatten, Unflatten

NARROW = (torch.bfloat16, torch.float16)


def boundaries(dtype: torch.dtype) -> Tensor:
    """Returns float32 numbers on, between and next to between all finite numbers of `dtype`, of both signs."""
    exact = torch.arange(1 << 15).to(torch.int16).view(dtype).double()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:] + exact[:-1]) / 2
    largest = exact[-1]
    outside = torch.tensor([1.03, 1.07, 1.08, 1.2, 2.0, 1e30]).double() * largest
    special = torch.tensor([float("inf"), float("nan"), 1e-45, 1e-38, 3.4e38]).double()
    middle = between.float()
    up, down = (middle.view(torch.int32) + step for step in (1, -1))
    every = torch.cat(
        [exact.float(), middle, up.view(torch.float32), down.view(torch.float32), outside.float()]
    )
    every = torch.cat([every, special.float()])
    return torch.cat([every, -every])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_float32_is_rounded_to_nearest_even_at_every_boundary(device, dtype):
    values = boundaries(dtype)
    values = values[torch.arange(0, len(values), 5)]  # the interpreter is slow
    layout = BucketLayout([len(values)])
    bucket = layout.new_bucket(dtype, device)
    tensor = values.to(device)
    Flatten(layout, torch.float32, dtype, device).prepare([tensor], bucket)()
    assert same_numbers(bucket, values.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_number_of_a_narrow_dtype_is_widened_exactly(device, dtype):
    codes = torch.arange(1 << 16).to(torch.int16).view(dtype)
    layout = BucketLayout([len(codes)])
    out = torch.zeros(len(codes), device=device)
    bucket = codes.to(device)
    Unflatten(layout, dtype, torch.float32, device).prepare(bucket, [out])()
    assert same_numbers(out, codes.float())
