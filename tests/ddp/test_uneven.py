"""DDP where ranks differ: uneven inputs, and gradients with other indices on each rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, loss_of, network, train, train_alone
from ways import hooked, stock


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


def loss_of_words(model, rank, step):
    random = torch.Generator().manual_seed(100 * rank + step)
    return model(torch.randint(0, 50, (4, 3), generator=random)).square().mean()


@pytest.mark.parametrize("wrap", [stock, hooked])
@on_ranks(3)
def test_join(wrap):
    size = dist.get_world_size()
    model, _ = wrap(network(), bucket_cap_mb=0.001)
    with model.join():
        train(model, steps_of(dist.get_rank()))
    # Ranks without data count with gradients of zero; each rank's own optimizer stops with it,
    # and the last rank's weights are handed to all.

    def loss_while_there_is_data(model, rank, step):
        return loss_of(model, rank, step) * (step < steps_of(rank))

    alone = train_alone(steps_of(size - 1), size, loss_of=loss_while_there_is_data)
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


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("wrap", [stock, hooked])
@on_ranks(3)
def test_sparse_embedding(wrap, static_graph):
    (model, _), alone = wrap(Words(), static_graph=static_graph), Words()
    plain = functools.partial(torch.optim.SGD, lr=0.1)
    train(model, 4, plain(model.parameters()), loss_of_words)
    train_alone(4, dist.get_world_size(), plain, alone, loss_of_words)
    gradient = model.module.embedding.weight.grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense(), alone.embedding.weight.grad.to_dense())
    assert_like(model.module, alone)
    assert_replicated(model.module)
