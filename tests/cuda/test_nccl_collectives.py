"""Factors of reductions, as C++ gives them to NCCL."""

import ctypes

import torch
from nccl_ranks import Tensors, communicator, on_stand_in, stand_in


@on_stand_in(1)
def test_factors_are_read_where_they_are():
    """One factor is read when the operation is made, the other when the collective runs."""
    with communicator() as made:
        call = Tensors(made)
        tensor, result = torch.ones(3), torch.zeros(3)
        for number in range(20):
            call.reduce("all_reduce", tensor, result, "PREMUL_SUM", float(number))
            assert result.tolist() == [number] * 3
        factor = torch.tensor([2.0])
        nccl = ctypes.CDLL(made.library.path)
        nccl.ncclGroupStart()  # until its end, nothing runs
        call.reduce("all_reduce", tensor, result, "PREMUL_SUM", factor)
        factor.fill_(5.0)
        nccl.ncclGroupEnd()
        assert result.tolist() == [5.0] * 3
        before = len(stand_in.calls())
        call.reduce("all_reduce", tensor, result, "PREMUL_SUM", 19.0)
        assert result.tolist() == [19.0] * 3
        names = [name for name, _ in stand_in.calls()[before:]]
        assert names == ["redOpCreatePreMulSum", "allReduce", "redOpDestroy"]
