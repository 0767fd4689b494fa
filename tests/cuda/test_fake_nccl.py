"""The stand-in for NCCL: what it refuses is what NCCL would hang in, and its small floats are torch's."""

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import StandIn, Tensors, communicator, create
from world import Worlds
from world_rank import here

SUM = dist.ReduceOp.SUM


def differing(path: str, what: str) -> str:
    """One rank calls something else than the other; both must hear of it."""
    StandIn.load(path).clear()
    made, rank = create(path), here().rank
    call, tensor = Tensors(made), torch.ones(8)
    calls = {
        "count": lambda: call.all_reduce(tensor[: 4 + rank], tensor, SUM),
        "type": lambda: call.all_reduce(tensor if rank else tensor.int(), tensor, SUM),
        "op": lambda: call.all_reduce(tensor, tensor, dist.ReduceOp.MAX if rank else SUM),
        "root": lambda: call.broadcast(tensor, tensor, rank),
        "kind": lambda: (
            call.broadcast(tensor, tensor, 0) if rank else call.all_reduce(tensor, tensor, SUM)
        ),
        "message": lambda: call.send(tensor, 1) if rank == 0 else call.receive(tensor[:3], 0),
        "message type": lambda: (
            call.send(tensor, 1) if rank == 0 else call.receive(tensor.int(), 0)
        ),
    }
    with pytest.raises(dist.DistBackendError) as caught:
        calls[what]()
    call.all_reduce(tensor, tensor, SUM)  # it can be used further
    assert tensor.tolist() == [2.0] * 8
    assert made.destroy()
    return str(caught.value)


def wrong_arguments(path: str) -> None:
    with communicator(path) as made:
        call, tensor = Tensors(made), torch.ones(8)

        def raw(*arguments: int) -> None:
            try:
                made._raw.allReduce(*arguments)
            except Exception as error:
                raise made._translated("all_reduce", error) from None

        for use, text in (
            (lambda: call.broadcast(tensor, tensor, 1), "invalid rank 1 of 1"),
            (lambda: call.send(tensor, -1), "invalid rank -1 of 1"),
            (lambda: made.all_reduce(0, 0, 4, torch.float, SUM, 0), "a buffer is NULL"),
            (lambda: raw(1, 1, 0, 12, 0, 0), "invalid type 12"),
            (lambda: raw(1, 1, 0, 7, 9, 0), "unknown operation 9"),
        ):
            with pytest.raises(dist.DistBackendError, match=text):
                use()


def all_in_one_process(path: str) -> None:
    """Communicators of ncclCommInitAll go side by side in a group."""
    StandIn.load(path).clear()
    from cupy.cuda import nccl

    made = nccl.NcclCommunicator.initAll([4, 5, 6])
    assert [(one.rank_id(), one.size(), one.device_id()) for one in made] == [
        (0, 3, 4),
        (1, 3, 5),
        (2, 3, 6),
    ]
    tensors = [torch.full((70_000,), float(rank)) for rank in range(3)]
    nccl.groupStart()
    for one, tensor in zip(made, tensors, strict=True):
        one.allReduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), 7, 0, 0)
    nccl.groupEnd()
    assert all(tensor.eq(3).all() for tensor in tensors)
    nccl.groupStart()
    for rank, (one, tensor) in enumerate(zip(made, tensors, strict=True)):
        one.bcast(tensor.fill_(rank).data_ptr(), tensor.numel(), 7, 2, 0)
    nccl.groupEnd()
    assert all(tensor.eq(2).all() for tensor in tensors)
    for one in made:
        one.destroy()


def roundings(path: str) -> None:
    """A sum over one rank with a factor of one decodes and encodes; products of two must round like torch."""
    with communicator(path) as made:
        call = Tensors(made)
        for dtype in (torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            bits = torch.int16 if dtype.itemsize == 2 else torch.int8
            codes = torch.arange(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1))
            every = codes.to(bits).view(dtype)
            result = torch.zeros_like(every)
            call.all_reduce(every, result, dist._make_nccl_premul_sum(1.0))
            finite = every.float().isfinite()
            assert torch.equal(result.float()[finite], every.float()[finite])
            assert torch.equal(result.float().isnan(), every.float().isnan())
            for factor in (0.375, 0.9, 3.0):
                rounded = torch.tensor(factor).to(dtype).float()
                call.all_reduce(every, result, dist._make_nccl_premul_sum(factor))
                limit = torch.finfo(dtype).max
                wide = every.float() * rounded
                expected = (wide.clamp(-limit, limit) if dtype.itemsize == 1 else wide).to(dtype)
                assert torch.equal(result.float()[finite], expected.float()[finite]), (
                    dtype,
                    factor,
                )


@pytest.mark.parametrize("what", ["count", "type", "op", "root", "kind", "message", "message type"])
def test_ranks_that_differ_both_hear_of_it(world: Worlds, stand_in: str, what: str) -> None:
    texts = world(2).run(differing, stand_in, what, init=False)
    assert all("(status 4): " in text for text in texts), texts
    if not what.startswith("message"):
        assert all("rank 0 calls " in text and ", rank 1 " in text for text in texts), texts


def test_wrong_arguments_are_refused(world: Worlds, stand_in: str) -> None:
    world(1).run(wrong_arguments, stand_in, init=False)


def test_one_process_may_be_all_ranks(world: Worlds, stand_in: str) -> None:
    world(1).run(all_in_one_process, stand_in, init=False)


def test_small_floats_are_torchs(world: Worlds, stand_in: str) -> None:
    world(1).run(roundings, stand_in, init=False)
