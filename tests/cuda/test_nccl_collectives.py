"""What algorithms call of a communicator, with every dtype and reduction, against torch."""

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import Tensors, communicator, on_stand_in, stand_in


@on_stand_in(1)
def test_what_nccl_does_not_reduce_is_refused_with_what_to_do() -> None:
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
    with communicator() as made:
        call = Tensors(made)
        for dtype, op, text in cases:
            tensor = torch.zeros(3, dtype=dtype)
            with pytest.raises(
                TypeError, match=rf"fastcoll.all_reduce \[group 'g', rank 0/1\]: .*{text}"
            ):
                call.all_reduce(tensor, tensor, op)


@on_stand_in(1)
def test_factors_are_read_where_they_are() -> None:
    """One factor is read when the operation is made, the other when the collective runs."""
    with communicator() as made:
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
        names = [name for name, _ in stand_in.calls()[before:]]
        assert names == ["redOpCreatePreMulSum", "allReduce", "redOpDestroy"]
