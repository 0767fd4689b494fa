"""A tiny network, its data, and what one process computes where the ranks compute together."""

import copy
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "assert_gradients",
    "assert_like",
    "assert_replicated",
    "assert_same",
    "batch",
    "loss_of",
    "network",
    "parameters_of",
    "sgd",
    "train",
    "train_alone",
    "trained",
]

INPUTS, CLASSES, ROWS = 12, 5, 20


def network(dtype: torch.dtype = torch.double, width: int = 20) -> nn.Sequential:
    """Return the network with the same weights in every process."""
    random = torch.get_rng_state()
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, CLASSES, bias=False),
    ).to(dtype)
    torch.set_rng_state(random)
    return model


def trained(path: Path) -> nn.Sequential:
    """Return the network with the parameters in a file, which may be a checkpoint with more."""
    model = network()
    state = torch.load(path)
    model.load_state_dict(state.get("model", state))
    return model


def batch(rank: int, step: int, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of one rank and step; the labels can be learnt."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(ROWS, INPUTS, generator=random, dtype=torch.double)
    return inputs.to(dtype), inputs[:, :CLASSES].argmax(1)


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.double) -> Tensor:
    """Return the loss of one rank's batch."""
    inputs, labels = batch(rank, step, dtype)
    return nn.functional.cross_entropy(model(inputs), labels)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of most tests."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train(
    model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train on this rank's batches; return its losses."""
    optimizer = optimizer or sgd(model.parameters())
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(
    steps: int,
    size: int,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    model: nn.Module | None = None,
) -> nn.Module:
    """Train in this process alone on the batches of all ranks: the mean of their losses."""
    model = copy.deepcopy(model) if model is not None else network()
    optimizer = make_optimizer(model.parameters())
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, rank, step, dtype) / size).backward()
        optimizer.step()
    return model


def parameters_of(model: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_like(model: nn.Module, reference: nn.Module, tolerance: float = 1e-10) -> None:
    """Assert that both have the same parameters, and that training has moved them."""
    actual, expected = parameters_of(model), parameters_of(reference)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)
    start = parameters_of(network(expected.dtype))
    if start.shape == expected.shape:
        assert (start - expected).abs().max() > 3 * tolerance, "nothing was learnt"


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Assert that both have the same parameters, bit for bit."""
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def assert_gradients(
    model: nn.Module, reference: nn.Module, factor: float = 1.0, **tolerances: float
) -> None:
    """Assert that both have the same gradients, but for a factor."""
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad * factor, **tolerances)


def assert_replicated(model: nn.Module) -> None:
    """Assert that all ranks have the same bits."""
    mine = hashlib.sha256(parameters_of(model).numpy().tobytes()).hexdigest()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    assert set(everyones) == {mine}
