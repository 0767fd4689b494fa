"""fastcoll.fsdp: FSDP2 through shared staging, with a wire dtype."""

import random

import pytest
import torch
import torch.distributed as dist
from backend import backend_of
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import (
    assert_gradients,
    assert_like,
    assert_same,
    loss_of,
    network,
    sgd,
    sharded,
    train,
    train_alone,
)

import fastcoll.fsdp
from fastcoll.fsdp import FusedReduceScatter
from fastcoll.fsdp.staging import Staging

STEPS = 5


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2, 3)
def test_training_is_that_of_fsdp(reshard):
    """Without a wire dtype every bit is that of FSDP2's own calls."""
    ours = sharded(network(torch.float), reshard_after_forward=reshard)
    stock = sharded(network(torch.float), reshard_after_forward=reshard)
    fastcoll.fsdp.apply(ours)
    assert train(ours, STEPS) == train(stock, STEPS)
    assert_same(ours, stock)


@on_ranks(2, 3)
def test_a_wire_of_16_bits_loses_nothing_of_16_bit_gradients():
    """What was 16 bits wide travels in 16 bits without loss: the bits of a float32 reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, stock = (sharded(network(torch.float), mp_policy=policy) for _ in range(2))
    fastcoll.fsdp.apply(ours, wire_dtype=torch.bfloat16)
    for step in range(STEPS):
        for model in (ours, stock):
            loss_of(model, dist.get_rank(), step, torch.bfloat16).backward()
        assert_gradients(ours, stock, rtol=0, atol=0)


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
@on_ranks(1, 2, 3)
def test_reduce_scatter(wire):
    """Each input is rounded once, and the float32 sum not at all; squares are those of the output."""
    for elements in (0, 1, 1000, 300_007):
        for op in ("SUM", "AVG"):
            reduce_scatter(wire, op, elements)


def reduce_scatter(wire, op, elements):
    size, mine = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(elements)
    given = torch.randn(size, size * elements, generator=generator)
    scatter = FusedReduceScatter(wire)
    message = scatter.allocate((size * elements,), dtype=torch.float32, device=torch.device("cpu"))
    output = scatter.allocate((elements,), dtype=torch.float32, device=torch.device("cpu"))
    message.copy_(given[mine])
    operation = getattr(dist.ReduceOp, op)
    scatter(output, message, dist.group.WORLD, operation)
    total = torch.zeros(elements)
    for rank in range(size):
        part = given[rank, mine * elements : (mine + 1) * elements]
        total += part if wire is None else part.to(wire).float()
    if op == "AVG":
        total /= size
    assert torch.equal(output, total)
    squares = torch.ones(1, dtype=torch.float64)
    backend_of().reduce_scatter_fused(output, message, operation, wire, squares)
    torch.testing.assert_close(squares.item(), total.double().square().sum().item())


@on_ranks(2)
def test_buffers_are_used_again():
    """The second step takes no new memory, and peers read the buffers where they are."""
    model = sharded(network(torch.float, width=300))
    fastcoll.fsdp.apply(model)
    optimizer = sgd(model.parameters())
    state = model[0]._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    buffers = groups[0]._reduce_scatter_comm._staging._buffers
    counts = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        counts.append(len(buffers))
    assert counts[0] > 0 and counts[-1] == counts[1], counts


@on_ranks(2)
def test_what_staging_keeps_is_bounded():
    """Sizes that no kept buffer serves, one behind the other, and then at random."""
    staging, cpu = Staging(), torch.device("cpu")
    kibibyte = 1 << 10

    def kept():
        return sum(buffer.memory.numel() for buffer in staging._buffers)

    for size, count in ((100, 2), (49, 4), (24, 8)):
        given = [staging.take([size * kibibyte], torch.uint8, cpu) for _ in range(count)]
        assert len({t.data_ptr() for t in given}) == count
        del given
    assert kept() <= 2 * 200 * kibibyte
    choose, given, most = random.Random(3), [], 200 * kibibyte
    for step in range(400):
        size = int(2 ** choose.uniform(0, 12)) * kibibyte
        given.append((step % 251, staging.take([size], torch.uint8, cpu).fill_(step % 251)))
        most = max(most, sum(tensor.numel() for _, tensor in given))
        assert kept() <= 2 * most, step
        while given and choose.random() < 0.6:
            value, tensor = given.pop(choose.randrange(len(given)))
            assert (tensor == value).all(), "memory in use was given out again"
            del tensor
    assert most > 200 * kibibyte


@on_ranks(2)
def test_gradients_are_accumulated():
    ours, stock = sharded(network(torch.float)), sharded(network(torch.float))
    fastcoll.fsdp.apply(ours)
    for model in (ours, stock):
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, dist.get_rank(), step).backward()
    assert_gradients(ours, stock, rtol=0, atol=0)


@on_ranks(4)
def test_replicated_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(), mesh=mesh)
    fastcoll.fsdp.apply(model)
    train(model, STEPS)
    assert_like(model, train_alone(STEPS, 4))


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"expected a wire_dtype of torch\.bfloat16.*got torch\.int8"
    ):
        FusedReduceScatter(torch.int8)
    with pytest.raises(ValueError, match="expected a module sharded by fully_shard, got Linear"):
        fastcoll.fsdp.apply(nn.Linear(2, 2))
