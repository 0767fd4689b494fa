"""What algorithms call of a communicator, with every dtype and reduction, against torch."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import Tensors, communicator
from oracle import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    assert_reduced,
    assert_same,
    reduce_op,
    reduced,
    sample,
)
from torch import Tensor
from world import Worlds
from world_rank import here

SIZES = [1, 2, 3, 4]
NCCL_INTEGERS = [one for one in INTEGERS if one not in (torch.int16, torch.uint16)]
ORDERED = ["PRODUCT", "MIN", "MAX"]
REDUCED = {
    **{dtype: ["SUM", "AVG", *ORDERED, "PREMUL_SUM"] for dtype in FLOATS},
    **{dtype: ["SUM", "AVG", "PREMUL_SUM"] for dtype in COMPLEX},
    **{dtype: ["SUM", "AVG", *ORDERED] for dtype in NCCL_INTEGERS},
    **{dtype: ["SUM", *ORDERED] for dtype in FLOAT8},
    torch.bool: ["SUM", *ORDERED, "BOR", "BAND"],
}
CASES = [(dtype, op) for dtype, ops in REDUCED.items() for op in ops]
LONG = 40_000
"""Elements that do not go at once."""


def inputs(dtype: torch.dtype, count: int) -> list[Tensor]:
    """Every rank's tensor."""
    if dtype in FLOAT8:  # sums and products of these are exact, or halfway between none
        values = torch.tensor([0.0, 0.5, 1.0, -1.0, 1.5, -2.0, 3.0])
        picks = (
            torch.randint(0, 7, (count,), generator=torch.Generator().manual_seed(rank))
            for rank in range(here().size)
        )
        return [values[pick].to(dtype) for pick in picks]
    return [sample(rank, [count], dtype) for rank in range(here().size)]


def assert_right(actual: Tensor, tensors: Sequence[Tensor], op: str) -> None:
    """Like the oracle's, also for what the CPU side refuses: sums of 8-bit floats."""
    if actual.dtype in FLOAT8:
        expected = reduced([t.float() for t in tensors], op).to(actual.dtype)
        assert_same(actual.float(), expected.float())
    else:
        assert_reduced(actual, tensors, op)


def all_reduces(path: str) -> None:
    with communicator(path) as made:
        call = Tensors(made)
        for dtype, op in CASES:
            tensors = inputs(dtype, 37)
            mine, result = tensors[here().rank].clone(), torch.zeros_like(tensors[0])
            call.all_reduce(mine, result, reduce_op(op))
            assert_right(result, tensors, op)
            assert_same(mine, tensors[here().rank])
            call.all_reduce(mine, mine, reduce_op(op))
            assert_same(mine, result)


def any_length(path: str) -> None:
    rank, size = here().rank, here().size
    with communicator(path) as made:
        call = Tensors(made)
        for count in (0, 1, LONG):
            tensors = inputs(torch.double, count)
            result = torch.zeros(count, dtype=torch.double)
            call.all_reduce(tensors[rank], result, dist.ReduceOp.SUM)
            if count:
                assert_right(result, tensors, "SUM")
            with made.group():
                call.receive(result, (rank - 1) % size)
                call.send(tensors[rank], (rank + 1) % size)
            assert_same(result, tensors[rank - 1])
            blocks = inputs(torch.int32, count * size)
            part = torch.zeros(count, dtype=torch.int32)
            call.reduce_scatter(blocks[rank], part, dist.ReduceOp.SUM)
            assert_same(part, sum(b[count * rank :][:count] for b in blocks))


def refusals(path: str) -> None:
    cases = [
        (torch.int16, dist.ReduceOp.SUM, "expected a dtype that NCCL reduces, got torch.int16"),
        (torch.int32, dist.ReduceOp.BXOR, "expected an operation that NCCL has for torch.int32"),
        (torch.bool, dist.ReduceOp.AVG, "SUM, PRODUCT, MAX, MIN, BOR, BAND"),
        (torch.complex64, dist.ReduceOp.MAX, r"torch.complex64 \(SUM, AVG, PREMUL_SUM\), got MAX"),
        (
            torch.int32,
            dist._make_nccl_premul_sum(2.0),
            "expected a floating-point or complex dtype",
        ),
        (torch.half, dist.ReduceOp.PREMUL_SUM, "expected PREMUL_SUM with a factor"),
        (
            torch.half,
            dist._make_nccl_premul_sum(torch.ones(1)),
            "of torch.float16, got 1 of torch.fl",
        ),
    ]
    with communicator(path) as made:
        call = Tensors(made)
        for dtype, op, text in cases:
            tensor = torch.zeros(3, dtype=dtype)
            with pytest.raises(
                TypeError, match=rf"fastcoll.all_reduce \[group 'g', rank 0/1\]: .*{text}"
            ):
                call.all_reduce(tensor, tensor, op)


def factors(path: str) -> list[str]:
    """One factor is read when the operation is made, the other when the collective runs."""
    from nccl_ranks import StandIn

    stand_in = StandIn.load(path)
    with communicator(path) as made:
        call = Tensors(made)
        tensor, result = torch.ones(3), torch.zeros(3)
        for number in range(20):
            call.all_reduce(tensor, result, dist._make_nccl_premul_sum(float(number)))
            assert result.tolist() == [number] * 3
        factor = torch.tensor([2.0])
        with made.group():
            call.all_reduce(tensor, result, dist._make_nccl_premul_sum(factor))
            factor.fill_(5.0)
        assert result.tolist() == [5.0] * 3
        before = len(stand_in.calls())
        call.all_reduce(tensor, result, dist._make_nccl_premul_sum(19.0))
        assert result.tolist() == [19.0] * 3
        return [name for name, _ in stand_in.calls()[before:]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", [all_reduces, any_length])
def test_collectives(world: Worlds, stand_in: str, size: int, function: object) -> None:
    world(size).run(function, stand_in, init=False)


def test_what_nccl_does_not_reduce_is_refused_with_what_to_do(world: Worlds, stand_in: str) -> None:
    world(1).run(refusals, stand_in, init=False)


def test_factors_are_read_where_they_are(world: Worlds, stand_in: str) -> None:
    assert world(1).run(factors, stand_in, init=False) == [
        ["redOpCreatePreMulSum", "allReduce", "redOpDestroy"]
    ]
