"""DDP where ranks differ: uneven inputs, and gradients with other indices on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, loss_of, network, sgd
from world import on_ranks


def steps_of(rank):
    return 3 + 2 * rank


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.EmbeddingBag(50, 6, mode="sum", sparse=True).double()
        self.last = nn.Linear(6, 3).double()

    def forward(self, words):
        return self.last(self.embedding(words))


def words(rank, step):
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, 50, (4, 3), generator=random)


@on_ranks(3)
def test_join():
    size = dist.get_world_size()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    optimizer = sgd(model.parameters())
    with model.join():
        for step in range(steps_of(dist.get_rank())):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    # Ranks without data count with gradients of zero; each rank's own optimizer stops with it,
    # and the last rank's weights are handed to all.
    alone = network()
    alone_optimizer = sgd(alone.parameters())
    for step in range(steps_of(size - 1)):
        alone_optimizer.zero_grad()
        for rank in range(size):
            if step < steps_of(rank):
                (loss_of(alone, rank, step) / size).backward()
        alone_optimizer.step()
    assert_like(model.module, alone)
    assert_replicated(model.module)


@on_ranks(2, fresh=True)
def test_join_that_raises():
    model = DistributedDataParallel(network())
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        model.join(throw_on_early_termination=True),
    ):
        for step in range(3 + dist.get_rank()):
            loss_of(model, dist.get_rank(), step).backward()
    dist.barrier()


@pytest.mark.parametrize("static_graph", [False, True], ids=["plain", "static_graph"])
@on_ranks(3)
def test_sparse_embedding(static_graph):
    size = dist.get_world_size()
    model = DistributedDataParallel(Words(), static_graph=static_graph)
    alone = Words()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(words(dist.get_rank(), step)).square().mean().backward()
        assert model.module.embedding.weight.grad.is_sparse
        for rank in range(size):
            (alone(words(rank, step)).square().mean() / size).backward()
        torch.testing.assert_close(
            model.module.embedding.weight.grad.to_dense(), alone.embedding.weight.grad.to_dense()
        )
        for optimizer in optimizers:
            optimizer.step()
    assert_like(model.module, alone)
    assert_replicated(model.module)
