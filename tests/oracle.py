"""Expected results of collectives, computed by plain torch and NumPy in one process.

Every rank's input is a function of (rank, shape, dtype, seed), so each rank can compute the other ranks' inputs and
the expected result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from backend import IS_GLOO
from torch import Tensor

FLOATS = [torch.half, torch.bfloat16, torch.float, torch.double]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
GLOO_REDUCES = [*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64]
"""Types that gloo reduces correctly; it sums bools as bytes, and complex numbers as reals."""

GLOO_MOVES = [*GLOO_REDUCES, *COMPLEX, torch.bool]

BITWISE = ["BAND", "BOR", "BXOR"]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE, "PREMUL_SUM"]

FACTOR = 0.375
"""Factor of PREMUL_SUM."""


def allows(op: str, dtype: torch.dtype) -> bool:
    """Return whether ``op`` is defined for ``dtype``; if not, the backend must raise."""
    if dtype in FLOAT8:
        return False
    if dtype in COMPLEX:
        return op in ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")
    if dtype in FLOATS:
        return op not in BITWISE
    if op == "AVG":
        return dtype != torch.bool and not IS_GLOO
    return op != "PREMUL_SUM"


def reduce_op(op: str) -> Any:
    """Return torch.distributed's ``op=`` argument."""
    return dist._make_nccl_premul_sum(FACTOR) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def sample(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the contiguous input of one rank: any bits for integers, near one for floats."""
    random = torch.Generator().manual_seed(1 + rank + 1000 * seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    if dtype in FLOAT8 or dtype in INTEGERS:
        count = math.prod(shape) * dtype.itemsize
        words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=random)
        return words.view(torch.uint8)[:count].view(dtype).reshape(shape)
    wide = torch.float if dtype in (torch.half, torch.bfloat16) else dtype
    return torch.randn(shape, generator=random, dtype=wide).to(dtype)


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of the ranks' tensors, by the tree of ``folded`` over the ranks.

    Integers wrap; their average is the wrapped sum's, truncated towards zero. Bools are summed by "or" and multiplied
    by "and". NaN wins in MIN and MAX. half and bfloat16 are accumulated in float and rounded once.
    """
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()):
        return _reduced_integers(tensors, op)
    if first.is_complex() and op != "PRODUCT":
        return torch.view_as_complex(reduced([torch.view_as_real(t) for t in tensors], op))
    wide = torch.float if first.dtype in (torch.half, torch.bfloat16) else first.dtype
    inputs = [t.to(wide) * FACTOR if op == "PREMUL_SUM" else t.to(wide) for t in tensors]
    combine = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op, torch.add)
    total = folded(inputs, combine)
    if op == "AVG":
        parts = torch.view_as_real(total) if total.is_complex() else total
        parts /= len(inputs)
    return total.to(first.dtype, copy=True)


def folded(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Combine values by a tree that splits at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    return combine(folded(values[:middle], combine), folded(values[middle:], combine))


def _reduced_integers(tensors: Sequence[Tensor], op: str) -> Tensor:
    function = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[op]
    total = tensors[0].numpy()
    for other in tensors[1:]:
        total = function(total, other.numpy())
    if op == "AVG":
        count = total.dtype.type(len(tensors))
        cut = (total % count != 0) & (total < 0)  # numpy's // rounds down
        total = total // count + cut.astype(total.dtype)
    return torch.from_numpy(np.array(total)).reshape(tensors[0].shape)


def raw(tensor: Tensor) -> Tensor:
    """Return the elements' bytes in row-major order, for bitwise comparison."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def bits(tensor: Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    return raw(tensor).numpy().tobytes()


def assert_alike(value: object) -> None:
    """Assert that the value is equal on all ranks."""
    everyones: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    assert everyones == [value] * len(everyones)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert same shape, dtype and bits; ``actual`` may be on a device."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.equal(raw(actual), raw(expected)), (actual, expected)


def assert_reduced(actual: Tensor, tensors: Sequence[Tensor], op: str) -> None:
    """Assert that ``actual`` is the reduction of the ranks' tensors.

    Exact for integers, MIN and MAX; else within the rounding of a sum in the tensors' type, in any order.
    """
    actual, expected = actual.cpu(), reduced(tensors, op)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if torch.equal(raw(actual), raw(expected)):
        return
    assert op not in ("MIN", "MAX") and (actual.is_floating_point() or actual.is_complex()), (
        actual,
        expected,
    )
    precision = len(tensors) * torch.finfo(actual.dtype).eps
    wide = torch.complex128 if actual.is_complex() else torch.double
    if op == "PRODUCT":
        magnitude = torch.stack([t.to(wide).abs() for t in tensors]).prod(0)
    else:
        magnitude = torch.stack([t.to(wide).abs() for t in tensors]).sum(0)
    error = (actual.to(wide) - expected.to(wide)).abs()
    tiny = torch.finfo(actual.dtype).tiny
    wrong = ~(error <= 2 * precision * magnitude + tiny)
    assert not wrong.any(), (op, actual[wrong], expected[wrong])
