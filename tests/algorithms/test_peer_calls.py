"""Every call on device tensors in groups whose ranks map memory of each other: kernels beside NCCL."""

import os
from datetime import timedelta

import device_calls
import kernel_oracle
import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from device_calls import inputs_of
from device_ranks import in_order
from engine_cases import BETWEEN, CASES
from on_ranks import on_ranks
from test_peer_engine import assert_reduced_lists, lists_of
from training import assert_like, network, sharded, train, train_alone
from world import init_group

import fastcoll


def every_call(async_op):
    for case in CASES:
        if dist.get_world_size() == 1 and case in BETWEEN:
            continue
        in_order(case, async_op)
    return bool(peer_memory.reduces_of().plans.built)


@pytest.mark.parametrize(("size", "async_op"), [(2, False), (3, True)], ids=["2-sync", "3-async"])
def test_every_call(peer_world, size, async_op):
    assert all(peer_world(size).run(every_call, async_op))


@pytest.mark.parametrize("algorithm", ["auto", "nccl"])
@on_ranks(2, world="peer_world", init=False)
def test_every_call_at_level_detail(algorithm):
    """torch wraps the backend and checks every collective by a gloo group of its own."""
    os.environ["FASTCOLL_ALGO"] = algorithm
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        init_group(backend="fastcoll")
        for async_op in (False, True):
            assert every_call(async_op) == (algorithm == "auto")
        tensors = [torch.ones(30, device=peer_memory.DEVICE) for _ in range(6)]
        fastcoll.all_reduce_coalesced(tensors)
        assert all(tensor.cpu().eq(2).all() for tensor in tensors)
        for device in ("cpu", peer_memory.DEVICE):
            tensors = [torch.ones(30, device=device) for _ in range(6)]
            fastcoll.all_reduce_coalesced(tensors, wire_dtype=torch.bfloat16, scale=0.5)
            assert all(tensor.cpu().eq(1).all() for tensor in tensors)
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks(2, world="peer_world", fresh=True)
def test_fsdp_with_peers():
    expected = train_alone(3, 2, model=network(torch.float, 256))
    with recording_device.no_violations():
        model = sharded(network(torch.float, 256).to(peer_memory.DEVICE))
        train(model, 3)
        assert_like(model, expected, 1e-6)


@pytest.mark.full
@on_ranks(8, world="peer_world")
def test_eight_ranks():
    """More ranks than cores, and more pieces than channels."""
    for seed, (algorithm, dtype, wire, count) in enumerate(
        [("one_shot", torch.bfloat16, None, 3000), ("two_shot", torch.float32, torch.bfloat16, 3001)]
    ):  # fmt: skip
        os.environ["FASTCOLL_ALGO"] = algorithm
        group = dist.new_group(timeout=timedelta(seconds=240))  # 8 interpreters on 2 cores
        inputs = inputs_of(count, dtype, seed)
        x = inputs[dist.get_rank()].to(peer_memory.DEVICE)
        device_calls.all_reduce(x, dist.ReduceOp.AVG, group, wire_dtype=wire)
        assert torch.equal(x.cpu(), kernel_oracle.all_reduce(inputs, "avg", 1.0, wire))
        lists = lists_of(dtype, seed, (1, 17, 0, 1000, 3))
        tensors = [tensor.to(peer_memory.DEVICE) for tensor in lists[dist.get_rank()]]
        fastcoll.all_reduce_coalesced(tensors, dist.ReduceOp.AVG, group, wire_dtype=wire)
        assert_reduced_lists(tensors, lists, "avg", 1.0, wire)


@on_ranks(2, world="peer_world")
def test_odd_inputs():
    """Empty tensors, tensors with gaps or out of order, scalars, and one tensor beside itself."""
    device, me = peer_memory.DEVICE, dist.get_rank()
    empty = torch.empty(0, device=device)
    dist.all_reduce(empty)
    fastcoll.all_reduce_coalesced([empty, empty])
    scalar = torch.tensor(1.0 + me, device=device)
    dist.all_reduce(scalar)
    assert scalar.item() == 3
    transposed = (torch.arange(12.0).view(3, 4).to(device) + me).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed.cpu(), (2 * torch.arange(12.0).view(3, 4) + 1).t())
    whole = torch.ones(64, device=device)
    views = [whole[at * 16 : at * 16 + 15] for at in range(4)]  # neighbours, at odd addresses too
    fastcoll.all_reduce_coalesced([*views, whole[63:]])
    assert whole.cpu()[15::16].tolist() == [1, 1, 1, 2] and whole.cpu()[:15].eq(2).all()
    factor = torch.ones(40, device=device)
    # NCCL's own: each rank may have another factor.
    dist.all_reduce(factor, dist._make_nccl_premul_sum(1.0 + me))
    assert factor.cpu().eq(3).all()
    many = [torch.ones(8, device=device) for _ in range(6)]
    fastcoll.all_reduce_coalesced(many, dist._make_nccl_premul_sum(1.0 + me))
    assert all(tensor.cpu().eq(3).all() for tensor in many)
    # Another factor, another plan.
    fastcoll.all_reduce_coalesced(many, dist._make_nccl_premul_sum(0.5))
    assert all(tensor.cpu().eq(3).all() for tensor in many)
    fastcoll.all_reduce_coalesced(many, dist._make_nccl_premul_sum(2.0), wire_dtype=torch.bfloat16)
    assert all(tensor.cpu().eq(12).all() for tensor in many)
    same = torch.ones(9, device=device)
    with pytest.raises(ValueError, match="apart"):
        fastcoll.all_reduce_coalesced([same] * 5)
    dist.all_reduce(same)
    assert same.cpu().eq(2).all()
