"""Collectives of tensors on a device with streams: results, and the order of all accesses.

The engine runs as on a GPU: CuPy calls a stand-in for NCCL, and the device is one of host memory that
checks the order of streams. Every case here also checks that nothing was out of order.
"""

import device_ranks
import pytest
import recording_device
import torch
import torch.distributed as dist
from collective_cases import MOVED, MOVING, REDUCING, Case, nccl_pairs, run
from device_ranks import in_order
from engine_cases import BETWEEN, CASES, DEVICE
from on_ranks import on_ranks
from oracle import FLOAT8, reduce_op, reduced
from world import here


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_results_and_order(nccl_world, case, async_op):
    sizes = (2, 3) if case in BETWEEN else (1, 2, 3)
    for size in sizes:
        nccl_world(size).run(in_order, case, async_op)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("collective", [*REDUCING, *MOVING[:-1]])
@on_ranks(world="nccl_world", around=in_order)
def test_every_type(size, collective):
    pairs = nccl_pairs() if collective in REDUCING else [("SUM", dtype) for dtype in MOVED]
    for op, dtype in pairs:
        run(Case(collective, op, dtype, (37,), root=-1, device=DEVICE))


@on_ranks(3, world="nccl_world", around=in_order)
def test_small_floats():
    """Sums and products of these are exact, or halfway between none."""
    values = torch.tensor([0.0, 0.5, 1.0, -1.0, 1.5, -2.0, 3.0])
    random = torch.Generator().manual_seed(0)
    picks = torch.randint(0, 7, (here().size, 50), generator=random)
    for dtype in FLOAT8:
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            given = values[picks].to(dtype)
            tensor = given[here().rank].to(DEVICE)
            dist.all_reduce(tensor, reduce_op(op))
            expected = reduced(list(given.float()), op).to(dtype)
            assert torch.equal(tensor.cpu().float(), expected.float()), (dtype, op)


@on_ranks(1, world="nccl_world", around=in_order)
def test_one_rank_makes_no_call_that_changes_nothing_and_needs_no_stream():
    x, y = torch.ones(9, device=DEVICE), torch.empty(1, 9, device=DEVICE)
    dist.all_reduce(x)  # makes the communicator
    recording_device.clear()
    works = [dist.all_reduce(x, reduce_op(op), async_op=True) for op in ("AVG", "SUM", "MAX")]
    works.append(dist.broadcast(x, 0, async_op=True))
    assert recording_device.log("launch") == []
    works.append(dist.all_gather_into_tensor(y, x, async_op=True))
    for work in works:
        work.get_future().wait()
        assert work.wait() and work.is_completed()
    assert y.add_(1).tolist() == [[2.0] * 9]
    used = {entry.stream for entry in recording_device.log("launch", "record")}
    assert used == {recording_device.name_of(torch.accelerator.current_stream())}


@on_ranks(2, world="nccl_world", around=in_order)
def test_what_nccl_does_not_reduce_is_refused():
    for dtype, op, text in [
        (torch.int16, "SUM", "expected a dtype that NCCL reduces, got torch.int16"),
        (torch.int32, "BXOR", "expected an operation that NCCL has for torch.int32"),
        (torch.bool, "AVG", "SUM, PRODUCT, MAX, MIN, BOR, BAND"),
        (torch.complex64, "MAX", r"torch.complex64 \(SUM, AVG, PREMUL_SUM\), got MAX"),
        (torch.int32, "PREMUL_SUM", "expected a floating-point or complex dtype"),
    ]:
        # Rank 0 waits in the next call, and compares what the other one calls meanwhile.
        for _ in range(1 if here().rank == 0 else 200):
            with pytest.raises(TypeError, match=rf"^fastcoll.reduce .*{text}"):
                dist.reduce(torch.zeros(3, dtype=dtype, device=DEVICE), 0, reduce_op(op))
    dist.all_reduce(torch.ones(3, device=DEVICE))  # the ranks are in step


@on_ranks(3, world="nccl_world", around=in_order)
def test_a_list_goes_in_one_call():
    """Tensors of a list, one a rank, go in one call: in place where they lie in a row, else by copies."""
    rank, size = here().rank, here().size
    ranks = torch.arange(float(size))
    row, apart = torch.zeros(size, 3, device=DEVICE), torch.zeros(size, 2, 3, device=DEVICE)
    outputs = {
        "row": list(row.unbind()),
        "apart": list(apart[:, 0].unbind()),
        "turned": [torch.zeros(3, 4, device=DEVICE).t() for _ in range(size)],
        # Each rank's own matter: one call all the same.
        "mixed": list((row if rank == 0 else apart[:, 1]).unbind()),
    }
    for name, found in outputs.items():
        device_ranks.stand_in().fakeNcclClearCalls()
        mine = torch.full_like(found[rank], float(rank))
        dist.all_gather(found, mine)
        assert [piece.unique().tolist() for piece in found] == [
            [value] for value in ranks.tolist()
        ], name
        assert (device_ranks.called("allGather"), device_ranks.called("broadcast")) == (1, 0), name
        found = (
            [piece + rank for piece in found]
            if name == "turned"
            else [piece.add_(rank) for piece in found]
        )
        device_ranks.stand_in().fakeNcclClearCalls()
        dist.reduce_scatter(mine, found)
        assert mine.unique().tolist() == [rank * size + ranks.sum()], name
        assert (device_ranks.called("reduceScatter"), device_ranks.called("reduce")) == (1, 0), name


@pytest.mark.parametrize("step", [0, 1, 2])
@on_ranks(3, world="nccl_world", around=in_order)
def test_a_list_may_hold_the_ranks_own_tensor(step):
    """What a rank gives or gets is one of the list's tensors, also another than the rank's own."""
    rank, size = here().rank, here().size
    values = torch.arange(4.0 * size).view(size, 4)
    sums = (size * values + 100 * sum(range(size)))[rank]
    for row in (True, False):
        pieces = list(torch.zeros(size, 4 if row else 8, device=DEVICE)[:, :4].unbind())
        for piece, given in zip(pieces, values + 100 * rank, strict=True):
            piece.copy_(given)
        own = pieces[(rank + step) % size]
        dist.reduce_scatter(own, pieces)
        assert torch.equal(own.cpu(), sums), row
        own.fill_(rank)
        dist.all_gather(pieces, own)
        assert [piece.unique().tolist() for piece in pieces] == [
            [float(of)] for of in range(size)
        ], row


@on_ranks(2, world="nccl_world")
def test_the_check_finds_a_missing_wait():
    x = torch.ones(100, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    x += 1
    work.wait()
    assert {found.kind for found in recording_device.violations()} == {"race"}
    recording_device.clear()
