"""``all_reduce_fused`` of the backend: lists, a narrower wire dtype, and the squares of each rank's share."""

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks
from oracle import assert_same, reduced, sample

import fastcoll

pytestmark = [beyond_gloo("no other backend has it"), *on_ranks(2)]

LISTS = [[3], [1000], [5, 0, 7, 100_000], [1_000_003], [33] * 30 + [70_001] * 7]


def fused(tensors, op=dist.ReduceOp.AVG, **options):
    return backend_of().all_reduce_fused(tensors, op, **options)


def like_the_oracle(sizes, dtype, wire=None, op="AVG"):
    given = [
        [sample(100 * i + rank, (size,), dtype) for i, size in enumerate(sizes)]
        for rank in range(dist.get_world_size())
    ]
    mine = [tensor.clone() for tensor in given[dist.get_rank()]]
    squares = torch.full((1,), 7.0, dtype=torch.float64)
    work = fused(
        mine, getattr(dist.ReduceOp, op), wire_dtype=wire, squares=squares, async_op=len(sizes) > 1
    )
    if work is not None:
        work.wait()
    expected = [
        reduced([tensor.to(wire or dtype) for tensor in tensors], op).to(dtype)
        for tensors in zip(*given, strict=True)
    ]
    for found, wanted in zip(mine, expected, strict=True):
        assert_same(found, wanted)
    dist.all_reduce(squares)
    total = sum(float(tensor.double().square().sum()) for tensor in expected)
    torch.testing.assert_close(squares.item(), total, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "wire"), [
    (torch.float32, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16), (torch.float64, None),
], ids=str)  # fmt: skip
@on_ranks(1, 2, 3)
def test_lists_wires_and_squares(dtype, wire):
    for sizes in LISTS:
        like_the_oracle(sizes, dtype, wire)


@pytest.mark.parametrize("op", ["SUM", "MAX"])
@on_ranks(3)
def test_other_operations(op):
    like_the_oracle(LISTS[2], torch.float32, torch.bfloat16, op)


@on_ranks(3)
def test_messages_in_shared_memory():
    """Read by the peers where they are, and measured all the same."""
    tensor = fastcoll.empty_shared(2_000_003, dtype=torch.float32).fill_(1.0 + dist.get_rank())
    squares = torch.zeros(1, dtype=torch.float64)
    fused([tensor], squares=squares)
    mean = (1 + dist.get_world_size()) / 2
    assert (tensor == mean).all()
    dist.all_reduce(squares)
    assert squares.item() == mean**2 * tensor.numel()


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_tensors_with_gaps(wire):
    whole = torch.arange(40_000, dtype=torch.float32).view(200, 200) % 100
    part = whole[:, ::2]
    squares = torch.zeros(1, dtype=torch.float64)
    fused([part.t()], dist.ReduceOp.SUM, wire_dtype=wire, squares=squares)
    size = dist.get_world_size()
    assert_same(part.contiguous(), part.new_tensor(range(0, 100, 2)).repeat(200, 2) * size)
    assert_same(whole[:, 1::2].contiguous(), part.new_tensor(range(1, 100, 2)).repeat(200, 2))


@pytest.mark.parametrize("wire", [None, torch.float16])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_the_squares(value, wire):
    """One element on one rank is enough, wherever it lies."""
    for place in (0, 4999, 299_999):
        tensor = torch.ones(300_000)
        if dist.get_rank() == 1:
            tensor[place] = value
        squares = torch.zeros(1, dtype=torch.float64)
        fused([tensor], wire_dtype=wire, squares=squares)
        dist.all_reduce(squares)
        assert not squares.isfinite().item()


def test_an_overflow_of_the_wire_shows_in_the_squares():
    tensor = torch.full((1000,), 70_000.0)
    squares = torch.zeros(1, dtype=torch.float64)
    fused([tensor], wire_dtype=torch.float16, squares=squares)
    assert tensor.isinf().all()
    assert squares.isinf().item() or dist.get_rank() * 512 >= 1000


BAD = {
    "at least one tensor": (ValueError, [], {}),
    "float32 tensors to travel": (TypeError, [(3, torch.float64)], {"wire_dtype": torch.bfloat16}),
    "a wire dtype of": (TypeError, [(3, torch.float32)], {"wire_dtype": torch.float8_e4m3fn}),
    "one float64 element": (
        ValueError,
        [(3, torch.float32)],
        {"squares": torch.zeros(2, dtype=torch.float64)},
    ),
    "floating-point numbers": (
        TypeError,
        [(3, torch.int32)],
        {"squares": torch.zeros(1, dtype=torch.float64), "op": dist.ReduceOp.SUM},
    ),
    "of one dtype": (TypeError, [(3, torch.float32), (3, torch.float64)], {}),
}


@pytest.mark.parametrize("text", list(BAD))
def test_bad_arguments(text):
    error, tensors, options = BAD[text]
    with pytest.raises(error, match=text) as caught:
        fused([torch.zeros(size, dtype=dtype) for size, dtype in tensors], **options)
    assert "fastcoll.all_reduce_fused [group '" in str(caught.value)
    like_the_oracle([100], torch.float32)  # the group goes on
