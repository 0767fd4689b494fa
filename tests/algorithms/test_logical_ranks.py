"""``logical_ranks``: one result on any number of ranks. The oracle is one process that folds all shards' gradients."""

import contextlib

import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from oracle import folded
from peer_memory import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, network, sgd

import fastcoll
import fastcoll.fsdp
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

STEPS = 3


def reference(shards, dtype=torch.float, average=True):
    """Returns the parameters after some steps, and the norm of the last gradients."""
    model = network(dtype)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        gradients = [
            torch.autograd.grad(loss_of(model, shard, step), list(model.parameters()))
            for shard in range(shards)
        ]
        sums = [
            folded([one.to(torch.promote_types(dtype, torch.float)) for one in of_one], torch.add)
            for of_one in zip(*gradients, strict=True)
        ]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = (total / (shards if average else 1)).to(dtype)
        optimizer.step()
    norm = torch.cat([(total / shards).double().flatten() for total in sums]).norm()
    return [parameter.detach() for parameter in model.parameters()], norm


def train(model, shards, optimizer=None):
    """Trains a model by the shards that `shards()` yields; returns its parameters on the CPU."""
    optimizer = optimizer or sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for shard in shards():
            loss_of(model, shard, step).backward()
        optimizer.step()
    return [
        getattr(parameter, "full_tensor", parameter.detach)().detach().cpu()
        for parameter in model.parameters()
    ]


def by_hook(model, group, count, **options):
    state = FusedAllreduceState(group, logical_ranks=count, **options)
    views = count % 2 == 0
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=views
    )
    ddp.register_comm_hook(state, fused_allreduce_hook)
    return ddp, lambda: state.shards(ddp), state


def by_synchronizer(model, group, count, **options):
    synchronizer = GradientSynchronizer(
        model, group, logical_ranks=count, bucket_cap_mb=0.001, **options
    )
    return model, synchronizer.shards, synchronizer


def by_fsdp(model, group, count):
    where = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, where)
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    shards = fastcoll.fsdp.apply(model, logical_ranks=count)
    return model, lambda: iter(shards), None


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


FULL = pytest.mark.full


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize(
    ("size", "count"),
    [
        *[(1, 8), (2, 8), (3, 8)],
        *[pytest.param(*one, marks=FULL) for one in ((4, 8), (6, 8), (8, 8), (4, 7), (2, 5))],
    ],
)
@on_ranks()
def test_the_result_is_that_of_one_process(size, count, make):
    model, shards, _ = make(network(torch.float), None, count)
    assert_same(train(model, shards), reference(count)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize("size", [2, 3, pytest.param(6, marks=FULL)])
@on_ranks(world="peer_world", fresh=True)
def test_device_tensors_have_the_same_bits(size, make):
    group = dist.new_group(pg_options=fastcoll.Options(order="fixed"))
    # FSDP2 frees gradients while the optimizer reads them: its next stream waits, which the model sees too late.
    ordered = contextlib.nullcontext if make is by_fsdp else recording_device.no_violations
    with ordered():
        model, shards, _ = make(network(torch.float).to(DEVICE), group, 8)
        assert_same(train(model, shards), reference(8)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.double])
@on_ranks(3)
def test_gradients_are_summed_in_float32_or_wider_and_rounded_once(make, dtype):
    model, shards, _ = make(network(dtype), None, 6)
    assert_same(train(model, shards), reference(6, dtype)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer])
@pytest.mark.parametrize(("size", "count"), [(2, 8), (3, 4)])
@on_ranks()
def test_the_norm_is_that_of_the_average(size, count, make):
    model, shards, statistics = make(network(torch.float), None, count, gradient_norm=True)
    train(model, shards)
    torch.testing.assert_close(statistics.grad_norm(), reference(count)[1], rtol=1e-5, atol=0)


@on_ranks(2)
def test_sums_need_no_division():
    model, shards, _ = by_synchronizer(network(torch.float), None, 6, average=False)
    assert_same(train(model, shards), reference(6, average=False)[0])


@on_ranks(2)
def test_what_cannot_be_one_sum_is_refused():
    model = network(torch.float)
    for options, text in [
        (
            {"logical_ranks": 1},
            "as many logical_ranks as the group has ranks, or more, got 1 for 2",
        ),
        ({"logical_ranks": 4, "wire_dtype": torch.bfloat16}, "no wire_dtype with logical_ranks"),
        ({"logical_ranks": 4, "find_unused_parameters": True}, "every parameter to get a gradient"),
    ]:
        with pytest.raises(ValueError, match=text):
            GradientSynchronizer(model, **options)
    with pytest.raises(ValueError, match="expected logical_ranks for shards"):
        GradientSynchronizer(network(torch.float)).shards()
    sharded = fully_shard(
        network(torch.float), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    )
    with pytest.raises(ValueError, match="gradients reduced in float32"):
        fastcoll.fsdp.apply(sharded, logical_ranks=4)


@on_ranks(2)
def test_passes_outside_of_shards_are_refused():
    model, shards, _ = by_synchronizer(network(torch.float), None, 4)
    with pytest.raises(RuntimeError, match=r"every backward pass inside `for shard in"):
        loss_of(model, 0, 0).backward()
    other, shards, _ = by_synchronizer(network(torch.float), None, 4)
    train(other, shards)
    with pytest.raises(RuntimeError, match="expected no gradients before the first shard"):
        next(shards())
    other.zero_grad()
    first = shards()
    next(first)
    with pytest.raises(RuntimeError, match="a gradient of every trained parameter for each shard"):
        next(first)


@on_ranks(2, world="peer_world", fresh=True)
def test_a_group_of_any_order_is_refused_on_a_device():
    model = nn.Linear(3, 3).to(DEVICE)
    synchronizer = GradientSynchronizer(model, logical_ranks=4)
    shards = synchronizer.shards()
    next(shards)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    next(shards)
    with pytest.raises(ValueError, match=r"order any on .* Use fastcoll with Options"):
        model(torch.ones(2, 3, device=DEVICE)).sum().backward()
