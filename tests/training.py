"""A tiny network, its data, and the reference that one process computes for all ranks."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from oracle import assert_alike, bits
from torch import Tensor, nn

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
    """Return the network with the parameters in a file, which may be a larger checkpoint."""
    model = network()
    state = torch.load(path)
    model.load_state_dict(state.get("model", state))
    return model


def batch(rank: int, step: int, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of one rank and step; the labels can be learnt."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(ROWS, INPUTS, generator=random, dtype=torch.double)
    return inputs.to(dtype), inputs[:, :CLASSES].argmax(1)


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the loss of one rank's batch, on the model's device and in the type of its parameters by default."""
    parameter = next(model.parameters())
    inputs, labels = batch(rank, step, dtype or parameter.dtype)
    return nn.functional.cross_entropy(
        model(inputs.to(parameter.device)), labels.to(parameter.device)
    )


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of most tests."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


Loss = Callable[[nn.Module, int, int], Tensor]
"""Loss of a model for a rank and a step."""


def train(
    model: nn.Module,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Loss = loss_of,
) -> list[float]:
    """Train on this rank's batches, without waiting for the device between them; return its losses."""
    optimizer = optimizer or sgd(model.parameters())
    losses = []
    for step in range(steps):
        loss = loss_of(model, dist.get_rank(), step)
        # Not before, as the copy of the batch waits for those on the device that read the gradients.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def train_alone(
    steps: int,
    ranks: int | Sequence[int],
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    model: nn.Module | None = None,
    loss_of: Loss = loss_of,
) -> nn.Module:
    """Train in this process only, on the batches of all ranks: the mean of their losses."""
    model = model or network()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        backward_alone(model, ranks, [step], loss_of)
        optimizer.step()
    return model


def backward_alone(
    model: nn.Module,
    ranks: int | Sequence[int],
    steps: Iterable[int] = (0,),
    loss_of: Loss = loss_of,
) -> nn.Module:
    """Accumulate in this process the gradients of the ranks' mean loss in each step."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    for step in steps:
        for rank in ranks:
            (loss_of(model, rank, step) / len(ranks)).backward()
    return model


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    """Apply FSDP2 to each linear layer of a module, and to the whole."""
    from torch.distributed.fsdp import fully_shard  # takes a process a second

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


class Branches(nn.Module):
    """Uses one of its heads, which the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network()
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(inputs))


def loss_by_turns(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of ``Branches`` through its first two heads, which alternate with rank and step."""
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs, (rank + step) % 2), labels)


class Given(nn.Module):
    """A module whose gradients are its inputs, in tensors of these lengths."""

    def __init__(self, *lengths: int, dtype: torch.dtype = torch.float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(n, dtype=dtype) for n in lengths)

    def forward(self, inputs: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * inputs).sum()

    def gradient(self) -> Tensor:
        return torch.cat([weight.grad for weight in self.weights])


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, if this rank has only a shard of it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parameters_of(model: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([full(p).detach().reshape(-1) for p in model.parameters()])


def assert_like(model: nn.Module, reference: nn.Module, tolerance: float = 1e-10) -> None:
    """Assert that both have the same parameters, and that training has moved them."""
    actual, expected = parameters_of(model).cpu(), parameters_of(reference)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)
    start = parameters_of(network(expected.dtype))
    if start.shape == expected.shape:
        assert (start - expected).abs().max() > 3 * tolerance, "nothing was learnt"


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Assert that both have the same parameters, bit for bit."""
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))


def assert_gradients(
    model: nn.Module, reference: nn.Module, factor: float = 1.0, **tolerances: float
) -> None:
    """Assert that both have the same gradients, up to a factor."""
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad) * factor, **tolerances)


def assert_replicated(model: nn.Module) -> None:
    """Assert that the parameters have the same bits on all ranks."""
    assert_alike(bits(parameters_of(model)))
