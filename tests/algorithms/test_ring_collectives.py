"""FASTCOLL_ALGO=ring: reduce-scatter and all-gather of device tensors by the ring's kernel, beside all-reduce."""

import os
from unittest import mock

import kernel_oracle
import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single
from device_calls import inputs_of
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import full


def ring_group():
    with mock.patch.dict(os.environ, FASTCOLL_ALGO="ring"):
        group = dist.new_group()
        dist.barrier(group=group)  # its first call on a device asks for the variable
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
    return group


SCATTERED = [
    (torch.float32, 1, "SUM"),
    (torch.float32, 37, "AVG"),
    (torch.bfloat16, 1000, "SUM"),
    (torch.float16, 16, "AVG"),
]
GATHERED = [(torch.float32, 1), (torch.bfloat16, 1001), (torch.uint8, 7), (torch.int64, 400)]


@pytest.mark.parametrize(("size", "async_op"), [full(2, False), (3, True)])
@on_ranks(world="peer_world")
def test_reduce_scatter_and_all_gather(size, async_op):
    group, rank, ranks = ring_group(), dist.get_rank(), dist.get_world_size()
    reduces = peer_memory.reduces_of(group)
    for in_place in (False, True):
        with recording_device.no_violations():
            for seed, (dtype, count, op) in enumerate(SCATTERED):
                inputs = inputs_of(count * ranks, dtype, seed)
                x = inputs[rank].to(DEVICE)
                chunk = slice(rank * count, (rank + 1) * count)
                out = x[chunk] if in_place else torch.empty(count, dtype=dtype, device=DEVICE)
                number = getattr(dist.ReduceOp, op)
                work = reduce_scatter_single(out, x, number, group=group, async_op=async_op)
                if async_op:
                    work.wait()
                expected = kernel_oracle.ring_reduce_scatter(inputs, op.lower())[rank]
                assert torch.equal((out + 0).cpu(), expected), (dtype, count, op)
            for dtype, count in GATHERED:
                given = [torch.arange(count).add(r).to(dtype) for r in range(ranks)]
                out = torch.empty(count * ranks, dtype=dtype, device=DEVICE)
                x = out[rank * count : (rank + 1) * count].copy_(given[rank])
                x = x if in_place else x.clone()
                work = all_gather_single(out, x, group=group, async_op=async_op)
                if async_op:
                    work.wait()
                assert torch.equal((out + 0).cpu(), torch.cat(given)), (dtype, count)
    plans = reduces.plans.values()
    assert {part.algorithm for plan in plans for part in plan.parts} == {"ring"}
    kinds = {("reduce_scatter", dtype, op) for dtype, _, op in SCATTERED}
    assert len(plans) >= len(kinds) + len({("all_gather", dtype) for dtype, _ in GATHERED})


@on_ranks(2, world="peer_world")
def test_plans_are_of_an_alignment():
    """A second call of the same kind, at another address of the same alignment, is prepared no more."""
    group, ranks = ring_group(), dist.get_world_size()
    plans = peer_memory.reduces_of(group).plans
    memory = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    built = plans.built
    for begin in (0, 64):
        out = torch.empty(2 * 12 * ranks, dtype=torch.uint8, device=DEVICE)
        all_gather_single(out[: 12 * ranks], memory[begin : begin + 12], group=group)
    assert plans.built == built + 1
    # Bytes can no longer be moved by fours.
    for begin in (2, 66):
        x = memory[begin : begin + 12].fill_(dist.get_rank())
        all_gather_single(out[1 : 1 + 12 * ranks], x, group=group)
        expected = torch.arange(ranks).repeat_interleave(12)
        assert torch.equal((out + 0)[1 : 1 + 12 * ranks].cpu(), expected.to(torch.uint8))
    assert plans.built == built + 2


@on_ranks(2, world="peer_world")
def test_what_the_ring_does_not_do():
    group, rank, ranks = ring_group(), dist.get_rank(), dist.get_world_size()
    x, out = torch.ones(4 * ranks, device=DEVICE), torch.empty(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"reduce_scatter.*ring.*int32"):
        reduce_scatter_single(out.int(), x.int(), group=group)
    # What is no flat tensor of all ranks' is NCCL's, as ever.
    parts = [torch.full((3,), float(rank), device=DEVICE) for _ in range(ranks)]
    gathered = [torch.empty(3, device=DEVICE) for _ in range(ranks)]
    dist.all_gather(gathered, parts[0], group=group)
    assert [each.cpu()[0].item() for each in gathered] == list(range(ranks))
    reduce_scatter_single(out, x, group=group)
    assert out.cpu().eq(ranks).all()


@on_ranks(2, world="peer_world")
def test_other_algorithms_leave_them_to_nccl():
    with mock.patch.dict(os.environ, FASTCOLL_ALGO="one_shot"):
        group, ranks = dist.new_group(), dist.get_world_size()
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
    reduces = peer_memory.reduces_of(group)
    built = reduces.plans.built
    out = torch.empty(4 * ranks, device=DEVICE)
    all_gather_single(out, torch.ones(4, device=DEVICE), group=group)
    assert out.cpu().eq(1).all() and reduces.plans.built == built
