"""Trainings with ``logical_ranks``, in each of the three ways, and the one process that they must equal."""

import torch
import torch.distributed as dist
from oracle import folded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, network, sgd

import fastcoll.fsdp
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

STEPS = 3


def reference(shards, dtype=torch.float, average=True, device="cpu"):
    """Returns the parameters after some steps, on the CPU, and the norm of the last gradients."""
    model = network(dtype).to(device)
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
    return [parameter.detach().cpu() for parameter in model.parameters()], norm


def train(model, shards, optimizer=None):
    """Trains a model by its shards; returns its parameters on the CPU."""
    optimizer = optimizer or sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for shard in shards:
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
    return ddp, state.shards(ddp), state


def by_synchronizer(model, group, count, **options):
    synchronizer = GradientSynchronizer(
        model, group, logical_ranks=count, bucket_cap_mb=0.001, **options
    )
    return model, synchronizer.shards(), synchronizer


def by_fsdp(model, group, count):
    where = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, where)
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    shards = fastcoll.fsdp.apply(model, logical_ranks=count)
    return model, shards, None


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
