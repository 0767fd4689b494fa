"""DeviceMesh, DTensor and tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from oracle import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import assert_like, batch

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicate": Replicate()}


def whole(rows=7, columns=5):
    return torch.arange(rows * columns, dtype=torch.double).reshape(rows, columns)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(12).double()
        self.up = nn.Linear(12, 24).double()
        self.down = nn.Linear(24, 12).double()

    def forward(self, inputs):
        return self.down(self.up(self.norm(inputs)).relu())


@on_ranks(4, fresh=True)
def test_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    data, model = mesh["data"], mesh["model"]
    row, column = divmod(dist.get_rank(), 2)
    assert tuple(mesh.get_coordinate()) == (row, column)
    assert dist.get_process_group_ranks(data.get_group()) == [column, column + 2]
    assert dist.get_process_group_ranks(model.get_group()) == [2 * row, 2 * row + 1]
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=data.get_group())
    assert tensor.item() == 2 * column + 2
    dist.all_reduce(tensor, group=model.get_group())
    assert tensor.item() == 6
    flat = mesh["data", "model"]._flatten("all")
    assert flat.size() == 4
    gathered = [torch.empty(1) for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group=flat.get_group())
    assert [int(t) for t in gathered] == [0, 1, 2, 3]


@pytest.mark.parametrize("target", PLACEMENTS)
@pytest.mark.parametrize("source", PLACEMENTS)
@on_ranks(3)
def test_redistribute(source, target):
    """Sizes that the ranks do not divide."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(whole(), mesh, [PLACEMENTS[source]])
    moved = tensor.redistribute(mesh, [PLACEMENTS[target]])
    assert moved.placements == (PLACEMENTS[target],)
    assert_same(moved.full_tensor(), whole())
    if target == "rows":
        parts = whole().chunk(dist.get_world_size())
        assert_same(moved.to_local(), parts[dist.get_rank()])


@pytest.mark.full
@pytest.mark.parametrize("target", PLACEMENTS)
@on_ranks(3)
def test_partial_sums(target):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = whole() * (dist.get_rank() + 1)
    tensor = DTensor.from_local(local, mesh, [Partial()])
    size = dist.get_world_size()
    moved = tensor.redistribute(mesh, [PLACEMENTS[target]])
    assert_same(moved.full_tensor(), whole() * (size * (size + 1) // 2))


@pytest.mark.full
@on_ranks(4, fresh=True)
def test_arithmetic_and_gradients():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    random = torch.Generator().manual_seed(0)
    left = torch.randn(6, 8, generator=random, dtype=torch.double)
    right = torch.randn(8, 10, generator=random, dtype=torch.double)
    a = distribute_tensor(left, mesh, [Shard(0), Shard(1)]).requires_grad_()
    b = distribute_tensor(right, mesh, [Replicate(), Shard(0)]).requires_grad_()
    product = a @ b
    product.sin().sum().backward()
    plain_a, plain_b = left.requires_grad_(), right.requires_grad_()
    expected = plain_a @ plain_b
    expected.sin().sum().backward()
    for ours, theirs in ((product, expected), (a.grad, plain_a.grad), (b.grad, plain_b.grad)):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@on_ranks(2)
def test_tensor_parallel(sequence_parallel):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = Block(), Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    parallelize_module(model, mesh, plan)
    inputs = batch(0, 0)[0]  # every rank sees the same rows
    mine = inputs
    if sequence_parallel:
        mine = distribute_tensor(inputs, mesh, [Shard(0)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours, theirs = model(mine), alone(inputs)
        if sequence_parallel:
            ours = DTensor.from_local(ours, mesh, [Shard(0)]).full_tensor()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_like(model, alone)
