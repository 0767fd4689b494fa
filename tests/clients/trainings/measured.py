"""What all trainings share: the small models, their data, and the line that the runner reads."""

import json
import statistics
import time
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS = 30
WARM_UP = 5  # steps whose time does not count
VOCABULARY = 256

torch.set_num_threads(1)


def build_mlp() -> nn.Module:
    """Return a network of 2.4 million parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def digits(samples: int) -> TensorDataset:
    """Return made-up inputs and their classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (samples,), generator=generator)
    centres = torch.randn(10, 256, generator=generator)
    noise = torch.randn(samples, 256, generator=generator)
    return TensorDataset(0.3 * centres[labels] + noise, labels)


def text(samples: int, length: int = 64) -> Tensor:
    """Return made-up sequences of tokens, each of which follows from the one before."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    return (start + 7 * torch.arange(length)) % VOCABULARY


class Gpt(nn.Module):
    """A decoder of four layers, 1.0 million parameters."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the tokens that follow."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.blocks(self.embedding(tokens[:, :-1]), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Measured:
    """The losses of a training, the times of its steps, and who served its groups."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends = [time.perf_counter()]

    def step(self, loss: Tensor | float) -> None:
        """Take the loss of a step that has just ended."""
        self.losses.append(float(torch.as_tensor(loss).detach()))
        self.ends.append(time.perf_counter())

    def result(self, *packages: str) -> dict[str, object]:
        """Return what the runner wants to know. Called while the groups are still there."""
        laps = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        return {
            "losses": [loss.hex() for loss in self.losses],
            "step_seconds": statistics.median(laps[WARM_UP:]),
            "steps": len(laps),
            "ranks": dist.get_world_size(),
            "served_by": _backends(),
            "versions": {name: version(name) for name in packages},
        }

    def report(self, *packages: str) -> None:
        """Print the result, on rank 0."""
        if dist.get_rank() == 0:
            print("\nCLIENT " + json.dumps(self.result(*packages)), flush=True)


def _backends() -> list[str]:
    """Return the names of the objects that serve the groups of this process, as torch has them.

    Those of torch's "fake" backend, which torchtitan makes for what it does not use, move nothing.
    """
    device = torch.device("cpu")
    groups = dist.distributed_c10d._world.pg_map
    return sorted({group._get_backend(device).name() for group in groups} - {"fake"})
