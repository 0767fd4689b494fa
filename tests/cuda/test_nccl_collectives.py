"""Reductions as C++ gives them to NCCL: what NCCL lacks is refused, and factors."""

import pytest
import torch
from nccl_ranks import Tensors, communicator, on_stand_in, stand_in


@on_stand_in(1)
def test_what_nccl_does_not_reduce_is_refused_with_what_to_do() -> None:
    cases = [
        (torch.int16, "SUM", "expected a dtype that NCCL reduces, got torch.int16"),
        (torch.int32, "BXOR", "expected an operation that NCCL has for torch.int32"),
        (torch.bool, "AVG", "SUM, PRODUCT, MAX, MIN, BOR, BAND"),
        (torch.complex64, "MAX", r"torch.complex64 \(SUM, AVG, PREMUL_SUM\), got MAX"),
        (torch.int32, "PREMUL_SUM", "expected a floating-point or complex dtype"),
    ]
    with communicator() as made:
        for dtype, op, text in cases:
            tensor = torch.zeros(3, dtype=dtype)
            with pytest.raises(TypeError, match=text):
                Tensors(made).reduce("all_reduce", tensor, tensor, op, 2.0)
        with pytest.raises(TypeError, match=r"^fastcoll.all_reduce \[group 'g', rank 0/1\]: exp"):
            Tensors(made).all_reduce(tensor.short(), tensor.short())


@on_stand_in(1)
def test_factors_are_read_where_they_are() -> None:
    """One factor is read when the operation is made, the other when the collective runs."""
    with communicator() as made:
        call = Tensors(made)
        tensor, result = torch.ones(3), torch.zeros(3)
        for number in range(20):
            call.reduce("all_reduce", tensor, result, "PREMUL_SUM", float(number))
            assert result.tolist() == [number] * 3
        factor = torch.tensor([2.0])
        with made.group():
            call.reduce("all_reduce", tensor, result, "PREMUL_SUM", factor)
            factor.fill_(5.0)
        assert result.tolist() == [5.0] * 3
        before = len(stand_in.calls())
        call.reduce("all_reduce", tensor, result, "PREMUL_SUM", 19.0)
        assert result.tolist() == [19.0] * 3
        names = [name for name, _ in stand_in.calls()[before:]]
        assert names == ["redOpCreatePreMulSum", "allReduce", "redOpDestroy"]
