"""All-reduces over peer memory on a GPU: what tests/algorithms shows with interpreted kernels, compiled and captured.

Several ranks share the GPU, which gives each process a slice of time in turn: few and small calls. One rank alone has
itself for a peer where FASTCOLL_ALGO asks for it.
"""

import contextlib
import os
import time
from dataclasses import asdict
from datetime import timedelta

import kernel_oracle
import pytest
import torch
import torch.distributed as dist
from device_calls import all_reduce, assert_bits_of_the_cpu, inputs_of, reduces_of
from logical_training import assert_same, by_fsdp, by_hook, by_synchronizer, reference, train
from on_ranks import on_ranks
from peer_memory import table_of
from suite_rules import bound
from torch import nn
from torch._C._distributed_c10d import ErrorType
from torch.nn.parallel import DistributedDataParallel
from training import network

import fastcoll
from fastcoll.cuda.thresholds import Thresholds, device_name
from fastcoll.ddp import FusedAllreduceState, fused_allreduce_hook

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
ALGORITHMS = ("one_shot", "two_shot", "ring")


def forced_group(algorithm, **options):
    """A group of all ranks; its first call on the device makes the region."""
    os.environ["FASTCOLL_ALGO"] = algorithm
    group = dist.new_group(**options)
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    del os.environ["FASTCOLL_ALGO"]
    topology = reduces_of(group).region.topology
    assert topology.peers or algorithm in ("nccl", "auto"), topology.reason
    return group


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks(world="gpu_peer_world")
def test_calls_are_the_oracle(size, algorithm):
    group = forced_group(algorithm)
    me = dist.get_rank()
    cases = (
        (torch.float32, None, "SUM", 1),
        (torch.float32, None, "AVG", 70_001),
        (torch.bfloat16, None, "AVG", 4099),
        (torch.float16, None, "SUM", 1 << 15),
        (torch.float32, torch.bfloat16, "AVG", 50_003),
        (torch.float32, torch.float16, "SUM", 16),
    )
    for seed, (dtype, wire, op, count) in enumerate(cases):
        inputs = inputs_of(count, dtype, seed)
        for async_op in (False, True):
            x = inputs[me].to(DEVICE)
            number = getattr(dist.ReduceOp, op)
            work = all_reduce(x, number, group, async_op, wire_dtype=wire, scale=0.5)
            if async_op:
                work.wait()
            expected = kernel_oracle.all_reduce(inputs, op.lower(), 0.5, wire, algorithm)
            assert torch.equal(x.cpu(), expected), (dtype, wire, op, count, async_op)
    assert reduces_of(group).chosen == algorithm


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks(world="gpu_peer_world")
def test_one_rounding_over_nccl(size):
    group = forced_group("nccl")
    for seed, (dtype, wire, count) in enumerate(
        [(torch.float32, torch.bfloat16, 5001), (torch.bfloat16, None, 32 * 48), (torch.float16, None, 7)]
    ):  # fmt: skip
        inputs = inputs_of(count, dtype, seed)
        x = inputs[dist.get_rank()].to(DEVICE)
        options = {"wire_dtype": wire, "algorithm": "all_to_all"}
        all_reduce(x, dist.ReduceOp.AVG, group, True, **options).wait()
        assert torch.equal(
            x.cpu(), kernel_oracle.all_reduce(inputs, "avg", 1.0, wire, "all_to_all")
        )


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@on_ranks(world="gpu_peer_world")
def test_sums_in_fixed_order_have_the_bits_of_the_cpu(size, mapped):
    options = fastcoll.Options(order="fixed")
    group = forced_group("two_shot" if mapped else "nccl", pg_options=options)
    for async_op in (False, True):
        assert_bits_of_the_cpu(group, DEVICE, async_op, sums_only=mapped)


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks(world="gpu_peer_world")
def test_logical_ranks_give_the_bits_of_one_process(size, make):
    group = forced_group("nccl", pg_options=fastcoll.Options(order="fixed"))
    model, shards, _ = make(network(torch.float).to(DEVICE), group, 8)
    assert_same(train(model, shards), reference(8, device=DEVICE)[0])


SIZES = (5, 300, 9001, 1, 16, 70_000)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "nccl"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_peer_world")
def test_lists_are_planned(size, algorithm):
    """Tensors that stay where they are share a plan; others that lie elsewhere get one of their own."""
    group = forced_group(algorithm)
    lists = [inputs_of(size, torch.float32, seed) for seed, size in enumerate(SIZES)]
    expected = [
        kernel_oracle.all_reduce(each, "avg", 1.0, torch.bfloat16, algorithm) for each in lists
    ]
    me = dist.get_rank()
    tensors = [each[me].to(DEVICE) for each in lists]
    plans = reduces_of(group).plans

    def check(tensors):
        for tensor, each in zip(tensors, lists, strict=True):
            tensor.copy_(each[me])
        fastcoll.all_reduce_coalesced(
            tensors, dist.ReduceOp.AVG, group, async_op=True, wire_dtype=torch.bfloat16
        ).wait()
        for tensor, right in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), right)

    built = plans.built
    for _ in range(6):
        check(tensors)
    assert plans.built == built + 1
    elsewhere = [torch.empty_like(tensor) for tensor in tensors]
    for _ in range(6):
        check(elsewhere)
        check(tensors)
    assert plans.built == built + 1


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_peer_world")
def test_in_a_graph_of_the_users(size, algorithm):
    group = forced_group(algorithm)
    x, many = torch.ones(3000, device=DEVICE), [torch.ones(50, device=DEVICE) for _ in range(8)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            dist.all_reduce(x, group=group)
            fastcoll.all_reduce_coalesced(many, group=group)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    new = [torch.ones(50, device=DEVICE) for _ in range(8)]
    wired = [torch.ones(60, device=DEVICE) for _ in range(8)]  # of a kind that no call had before
    with torch.cuda.graph(graph, stream=stream):
        dist.all_reduce(x, group=group)
        fastcoll.all_reduce_coalesced(many, group=group)
        fastcoll.all_reduce_coalesced(new, group=group)
        fastcoll.all_reduce_coalesced(wired, group=group, wire_dtype=torch.bfloat16)
        x += 1
    x.fill_(1)
    for tensor in (*many, *new, *wired):
        tensor.fill_(1)
    expected = 1.0
    for _ in range(3):
        graph.replay()
        expected = size * expected + 1
    assert x.cpu().eq(expected).all()
    assert all(tensor.cpu().eq(float(size**3)).all() for tensor in (*many, *new, *wired))
    torch.cuda.synchronize()
    dist.all_reduce(x, group=group)
    assert x.cpu().eq(size * expected).all()


@pytest.mark.parametrize("algorithm", ["two_shot", "nccl"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@on_ranks(2, world="gpu_peer_world")
def test_the_hook(wire, algorithm):
    """Ranks end with the same parameters, near those without the hook."""
    group = forced_group(algorithm)

    def trained(hook):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, process_group=group)
        state = FusedAllreduceState(group, wire_dtype=wire, gradient_norm=True)
        if hook:
            ddp.register_comm_hook(state, fused_allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.randn(6, 8, generator=generator).to(DEVICE)).square().mean().backward()
            optimizer.step()
        if hook:
            norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            torch.testing.assert_close(state.grad_norm().float(), norm)
        return [p.detach().cpu() for p in model.parameters()]

    ours, stock = trained(True), trained(False)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        others = [torch.empty_like(a) for _ in range(dist.get_world_size())]
        dist.all_gather(others, a)
        assert all(torch.equal(other, a) for other in others)


@on_ranks(2, world="gpu_peer_world", fresh=True)
def test_a_rank_that_never_arrives_on_peers():
    """The watchdog's deadline ends it, and the kernel that waits is let go."""
    group = forced_group("two_shot", timeout=timedelta(seconds=8))
    x = torch.ones(3000, device=DEVICE)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        if dist.get_rank() == 0:
            dist.all_reduce(x, group=group, async_op=True).wait(timedelta(seconds=40))
        backend = group._get_backend(torch.device(DEVICE))
        while backend.get_error() == ErrorType.SUCCESS:
            time.sleep(0.1)
            assert time.monotonic() - start < bound(10)
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    assert 7 < took < bound(10)
    text = str(caught.value)
    assert f"[group '{group.group_name}', rank {dist.get_rank()}/2" in text
    if dist.get_rank() == 0:
        assert "timed out after 8000 ms" in text
        assert "rank 1 completed call 2 of 2, under way: nothing" in text


@on_ranks(2, world="gpu_peer_world", fresh=True)
def test_a_kernel_that_waits_when_its_group_is_destroyed():
    """The kernel ends soon, and with it what waits for the device: not at its own limit."""
    group = forced_group("two_shot", timeout=timedelta(seconds=60))
    x = torch.ones(3000, device=DEVICE)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    start = time.monotonic()
    if dist.get_rank() == 0:
        dist.all_reduce(x, group=group, async_op=True)
    group._get_backend(torch.device(DEVICE)).abort()
    with contextlib.suppress(dist.DistBackendError):  # of the call that was under way
        dist.destroy_process_group(group)
    torch.cuda.synchronize()
    assert time.monotonic() - start < bound(8)


@on_ranks(2, world="gpu_peer_world")
def test_ranks_on_one_device_fall_back():
    """Without the variable ranks that share a GPU map nothing, and say why."""
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    limits = dict.fromkeys(asdict(Thresholds()), 1 << 20)
    os.environ["FASTCOLL_TUNING"] = table_of(device_name(torch.device(DEVICE)), limits)
    group = forced_group("auto")
    x = torch.ones(30, device=DEVICE)
    dist.all_reduce(x, group=group)
    assert x.cpu().eq(2).all()
    topology = reduces_of(group).region.topology
    assert topology.kernels and "ranks 0 and 1 are on one device" in topology.reason
