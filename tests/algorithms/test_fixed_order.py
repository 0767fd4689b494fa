"""``order="fixed"``: sums of device tensors have the bits of the CPU, whatever the call; what cannot have them raises.

Ranks are processes with interpreted kernels over the stand-in of NCCL. The other side is fastcoll's own CPU half, which
tests/oracle.py checks apart.
"""

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from device_calls import assert_bits_of_the_cpu, inputs_of
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import full
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel
from training import network, sharded, train

import fastcoll
from fastcoll.ddp import GradientSynchronizer


def fixed_group(order="fixed"):
    return dist.new_group(pg_options=fastcoll.Options(order=order))


def over_nccl(check, *arguments):
    """Runs a test where NCCL moves all data, as if ranks mapped no memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCOLL_ALGO", "nccl")
        check(*arguments)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [full(2), 3, 5, full(6)])
@on_ranks(world="peer_world", around=over_nccl)
def test_every_sum_has_the_bits_of_the_cpu(size, async_op):
    with recording_device.no_violations():
        assert_bits_of_the_cpu(fixed_group(), DEVICE, async_op)


@on_ranks(5, world="peer_world", around=over_nccl)
def test_a_list_and_a_batch_have_the_bits_of_each_alone():
    group, rank = fixed_group(), dist.get_rank()
    sizes = (5, 300, 33, 1, 16, 4097, 7, 9)
    own = [inputs_of(count, torch.float32, at)[rank] for at, count in enumerate(sizes)]
    alone = [tensor.to(DEVICE) for tensor in own]
    for tensor in alone:
        dist.all_reduce(tensor, group=group)
    fused = [tensor.to(DEVICE) for tensor in own]
    fastcoll.all_reduce_coalesced(fused, group=group)
    batch = [tensor.to(DEVICE) for tensor in own]
    with _coalescing_manager(group, torch.device(DEVICE)):
        for tensor in batch:
            dist.all_reduce(tensor, group=group)
    for one, two, three, tensor in zip(alone, fused, batch, own, strict=True):
        dist.all_reduce(tensor)
        assert torch.equal(one.cpu(), tensor)
        assert torch.equal(two.cpu(), tensor)
        assert torch.equal(three.cpu(), tensor)


def by_ddp(model, group):
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.002)


def by_synchronizer(model, group):
    model.synchronizer = GradientSynchronizer(model, process_group=group, bucket_cap_mb=0.002)
    return model


def by_fsdp(model, group):
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    return sharded(model, mesh=mesh)


@pytest.mark.parametrize("make", [by_ddp, by_synchronizer, by_fsdp])
@on_ranks(5, world="peer_world", fresh=True, around=over_nccl)
def test_training_ends_with_the_bits_of_the_cpu(make):
    """Several buckets a step; FSDP2 pads its shards."""
    results = []
    for device, group in (("cpu", dist.group.WORLD), (DEVICE, fixed_group())):
        model = make(network(torch.float).to(device), group)
        train(model, 4)
        parameters = [getattr(p, "full_tensor", p.detach)().cpu() for p in model.parameters()]
        results.append(parameters)
    for one in results[0]:
        first = one.clone()
        dist.broadcast(first, 0)
        assert torch.equal(one, first)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@on_ranks(5, world="peer_world", around=over_nccl)
def test_rooted_and_uneven_sums_have_the_bits_of_the_cpu():
    """A reduce leaves the other ranks' tensors as they were. Pieces of different lengths are a reduce for each."""
    group, rank, size = fixed_group(), dist.get_rank(), dist.get_world_size()
    for root, count in ((0, 1), (3, 70), (4, 5000), (3, 70)):
        own = inputs_of(count, torch.bfloat16, root)[rank]
        there, here = own.to(DEVICE), own.clone()
        dist.reduce(there, root, dist.ReduceOp.AVG, group)
        dist.reduce(here, root, dist.ReduceOp.AVG)
        assert torch.equal(there.cpu(), here if rank == root else own)
    lengths = [100 * to + 1 for to in range(size)]
    whole = inputs_of(sum(lengths), torch.float32)[rank]
    results = []
    for device, where in (("cpu", None), (DEVICE, group)):
        result = torch.empty(lengths[rank], device=device)
        dist.reduce_scatter(result, list(whole.to(device).split(lengths)), group=where)
        results.append(result.cpu())
    assert torch.equal(*results)


@on_ranks(3, world="peer_world")
def test_what_cannot_keep_the_order_is_refused_on_every_rank():
    """None of these reaches NCCL, so the group goes on."""
    group = fixed_group()
    x = torch.ones(6, device=DEVICE)
    on_device = dist._make_nccl_premul_sum(torch.tensor([0.5], device=DEVICE))
    calls = {
        "PRODUCT": lambda: dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=group),
        "complex64": lambda: dist.reduce(x.to(torch.complex64), 0, group=group),
        "the factor is on the device": lambda: dist.all_reduce(x, on_device, group=group),
    }
    for what, call in calls.items():
        for _ in range(2):
            text = rf"^fastcoll\.\w+ \[[^]]*\]: expected.*{what}.*Set FASTCOLL_ORDER=any"
            with pytest.raises(ValueError, match=text):
                call()
    dist.all_reduce(x, group=group)
    assert x.cpu().eq(3).all()


@on_ranks(2, world="peer_world")
def test_ranks_that_ask_for_different_orders_are_told_so():
    order = ("any", "fixed")[dist.get_rank()]
    group = dist.new_group(pg_options=fastcoll.Options(order=order))
    with pytest.raises(dist.DistBackendError, match="the same FASTCOLL_ORDER on all ranks"):
        dist.all_reduce(torch.ones(3, device=DEVICE), group=group)


@on_ranks(2, fresh=True)
def test_different_orders_of_cpu_tensors_are_named_at_the_first_wire():
    order = ("any", "fixed")[dist.get_rank()]
    group = dist.new_group(pg_options=fastcoll.Options(order=order))
    backend = group._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(3), group=group)  # the same with both
    with pytest.raises(dist.DistBackendError, match=r"bfloat16.3. on the wire with FASTCOLL_ORDER"):
        backend.all_reduce_fused([torch.ones(3)], dist.ReduceOp.SUM, torch.bfloat16)


@on_ranks(3, world="peer_world")
def test_the_ring_is_refused(monkeypatch):
    monkeypatch.setenv("FASTCOLL_ALGO", "ring")
    group = fixed_group()
    with pytest.raises(ValueError, match=r"ring: it sums in another order.*Set FASTCOLL_ALGO=auto"):
        dist.all_reduce(torch.ones(30, device=DEVICE), group=group)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@on_ranks(5, world="peer_world")
def test_kernels_over_mapped_memory_give_the_same_bits(monkeypatch, algorithm):
    monkeypatch.setenv("FASTCOLL_ALGO", algorithm)
    group = fixed_group()
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, group=group)
    assert peer_memory.reduces_of(group).chosen == algorithm
    assert_bits_of_the_cpu(group, DEVICE, False, sums_only=True)


def launched(what):
    """Returns the bytes that each call of NCCL with this name has read, in the order in which they were launched."""
    return [
        touched.bytes
        for entry in recording_device.log("launch")
        for touched in entry.touches
        if entry.what == what and not touched.write
    ]


@pytest.mark.parametrize("size", [2, 4, full(5)])
@on_ranks(world="peer_world", around=over_nccl)
def test_as_many_bytes_travel_as_in_a_ring(size):
    group, message = fixed_group(), 4 * 960 * size
    own = torch.ones(960 * size, device=DEVICE)
    half = own.new_empty(960)
    dist.all_reduce(own, group=group)
    recording_device.clear()
    dist.all_reduce(own, group=group)
    shares = launched("send")
    assert len(shares) == size  # one is to the rank itself
    sent = (size - 1) * (max(shares) + launched("allGather")[0])
    assert sent == 2 * (size - 1) * message // size
    recording_device.clear()
    dist.reduce_scatter_tensor(half, own, group=group)
    assert (size - 1) * max(launched("send")) == (size - 1) * message // size
    assert launched("allGather") == []


@pytest.mark.parametrize("order", ["any", "fixed"])
@on_ranks(3, world="peer_world", fresh=True, around=over_nccl)
def test_all_buckets_of_a_step_are_in_flight_at_once(order):
    """The device does nothing meanwhile, so the host has waited for none of them."""
    group = fixed_group(order)
    model = by_ddp(network(torch.float).to(DEVICE), group)
    train(model, 2)  # torch cuts the buckets anew in the second step
    inputs = torch.randn(4, next(model.parameters()).shape[1], device=DEVICE)
    recording_device.clear()
    with recording_device.held(torch.accelerator.current_stream()):
        model(inputs).sum().backward()
        last = "allGather" if order == "fixed" else "allReduce"
        buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert len(launched(last)) == len(buckets) > 1
