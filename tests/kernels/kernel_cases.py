"""Inputs for the kernels: tensors of any size at any address, with all kinds of numbers in them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from programs import python
from torch import Tensor

from fastcoll.buckets import BucketLayout

SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# Around one block of 4096 elements, one step of 1024, and 16 bytes.
SIZES = st.lists(
    st.one_of(
        st.sampled_from([0, 1, 7, 8, 1023, 1024, 1025, 4095, 4096, 4097, 8192]),
        st.integers(0, 9000),
    ),
    min_size=1,
    max_size=5,
)
SCALES = st.one_of(
    st.sampled_from([1.0, 0.125, 0.0, -3.0, 1 / 3]), st.floats(-1e6, 1e6, allow_nan=False)
)
CASES = st.integers(0, 2**31)
"""Seeds."""


def numbers(size: int, dtype: torch.dtype, seed: int, ordinary: bool = False) -> Tensor:
    """Returns `size` numbers: all of the dtype's bit patterns, or normally distributed ones."""
    generator = torch.Generator().manual_seed(seed)
    if ordinary:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    content = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
    return content.to(torch.uint8).view(dtype)


def at_offset(values: Tensor, offset: int, device: torch.device) -> Tensor:
    """Returns a copy that begins `offset` elements behind an address that is a multiple of 16."""
    memory = torch.empty(len(values) + offset, dtype=values.dtype, device=device)
    memory[offset:] = values.to(device)
    return memory[offset:]


def same_numbers(got: Tensor, expected: Tensor) -> bool:
    """Tells whether both have the same bits, or NaN in the same places."""
    got, expected = got.cpu(), expected.cpu()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    nan = expected.to(torch.float64).isnan()
    bits_equal = (got.view(integer) == expected.view(integer)) | nan
    return bool(bits_equal.all()) and torch.equal(got.to(torch.float64).isnan(), nan)


def assert_measured(
    squares: Tensor, tensors: Sequence[Tensor], layout: BucketLayout, block: int
) -> None:
    """Fails unless there is a sum for each block, of the squares of what was written there."""
    parts = [part.double() for tensor in tensors for part in tensor.cpu().split(block) if len(part)]
    expected = torch.stack([part.square().sum() for part in parts])
    assert len(squares) == layout.blocks(block) == len(expected)
    torch.testing.assert_close(squares.cpu(), expected, rtol=1e-13, atol=0, equal_nan=True)


def in_a_process_that_compiles(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where kernels are compiled, as this process may interpret them.

    It finds the modules of this folder and of tools.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1] / "tools"), *filter(None, [environ.get("PYTHONPATH")])]
    environ |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_DISABLE_LINE_INFO": "1"}
    return python(*arguments, env=environ, seconds=1800)
