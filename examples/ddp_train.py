"""Trains a small network on handwritten digits with DistributedDataParallel and a chosen backend.

    python examples/ddp_train.py                        two ranks, started by this script
    python examples/ddp_train.py --compare gloo         the same once more with gloo, and a table
    fastcoll demo                                       the same from an installed package
    torchrun --nproc-per-node 2 examples/ddp_train.py   ranks started by torchrun

It needs rich and scikit-learn. The data are the 1,797 images of 8x8 pixels that come with scikit-learn. The only
line that names the backend is ``dist.init_process_group(backend, ...)``. Exits with a message if at most 95% of the
test images are recognised. Exits likewise if the loss curves of two backends differ by more than 0.001.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

__all__ = ["Outcome", "Settings", "main", "train"]

WARM_UP_STEPS = 10
LEAST_ACCURACY = 0.95
LOSS_TOLERANCE = 1e-3  # with three or more ranks the order of a sum may differ


@dataclass(frozen=True)
class Settings:
    """The settings of a training, besides the backend."""

    epochs: int
    batch_size: int  # of one rank
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The results of a training, on rank 0."""

    backend: str
    losses: list[float]  # mean over the ranks, one value a step
    accuracy: float  # on the test images
    step_seconds: list[float]
    all_reduce_seconds: list[float]  # of one tensor as large as all gradients
    gradient_bytes: int


def build_model() -> nn.Module:
    """Two convolutions and two linear layers, 151,306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns the images, [n, 1, 8, 8] from 0 to 1, and their digits: four fifths to learn, one to test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, learn = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[learn], labels[learn]), TensorDataset(images[test], labels[test])


def batches(
    dataset: TensorDataset, sampler: DistributedSampler[int], size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's batches of one epoch; the last one may be smaller."""
    images, labels = dataset.tensors
    for indices in torch.tensor(list(sampler)).split(size):
        yield images[indices], labels[indices]


@contextlib.contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Yields a callable ``advance(loss)`` that draws a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"))
        yield lambda loss: progress.update(task, advance=1, loss=loss)


def accuracy(model: nn.Module, dataset: TensorDataset, rank: int, world_size: int) -> float:
    """Returns the share of right answers; each rank tests every world_size-th image."""
    images, labels = (tensor[rank::world_size] for tensor in dataset.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum().to(torch.float64)
    dist.all_reduce(right)
    return float(right.item()) / len(dataset)


def time_all_reduce(elements: int, repeats: int = 50) -> list[float]:
    """Returns the seconds of each of `repeats` all_reduce calls, which all ranks begin together."""
    tensor = torch.zeros(elements)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    return seconds


def train(
    backend: str, rank: int, world_size: int, rendezvous: str, settings: Settings
) -> Outcome | None:
    """Trains as one rank of a new process group.

    Returns:
        The outcome on rank 0, None on the others.
    """
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
    outcome = fit(backend, rank, world_size, settings)
    gc.collect()  # DDP and its group form a cycle; gloo's threads would abort the process when Python ends
    dist.destroy_process_group()
    return outcome if rank == 0 else None


def fit(backend: str, rank: int, world_size: int, settings: Settings) -> Outcome:
    """Trains within the default process group."""
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    learn, test = load_digits(settings.seed)
    sampler: DistributedSampler[int] = DistributedSampler(learn, seed=settings.seed)

    losses: list[Tensor] = []
    step_seconds: list[float] = []
    steps = settings.epochs * -(-len(sampler) // settings.batch_size)
    bar = progress_bar(f"{backend}, {world_size} ranks", steps) if rank == 0 else None
    with bar or contextlib.nullcontext(lambda loss: None) as advance:
        for epoch in range(settings.epochs):
            sampler.set_epoch(epoch)
            for images, labels in batches(learn, sampler, settings.batch_size):
                start = time.perf_counter()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                step_seconds.append(time.perf_counter() - start)
                losses.append(loss.detach())
                advance(losses[-1].item())

    curve = torch.stack(losses)
    dist.all_reduce(curve)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Outcome(
        backend=backend,
        losses=(curve / world_size).tolist(),
        accuracy=accuracy(model, test, rank, world_size),
        step_seconds=step_seconds[WARM_UP_STEPS:],
        all_reduce_seconds=time_all_reduce(sum(gradient.numel() for gradient in gradients)),
        gradient_bytes=sum(gradient.nbytes for gradient in gradients),
    )


def _rank_main(
    rank: int, backend: str, world_size: int, rendezvous: str, settings: Settings, result: str
) -> None:
    outcome = train(backend, rank, world_size, rendezvous, settings)
    if outcome is not None:
        torch.save(vars(outcome), result)


def train_in_processes(backend: str, world_size: int, settings: Settings) -> Outcome:
    """Starts the ranks on this machine, waits for them, and returns the outcome of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder, "outcome"))
        rendezvous = f"file://{folder}/rendezvous"
        spawn(_rank_main, (backend, world_size, rendezvous, settings, result), nprocs=world_size)
        return Outcome(**torch.load(result))


def print_table(outcomes: list[Outcome], world_size: int) -> None:
    """Prints one row for each backend, then compares the others with the last one."""
    from rich.console import Console
    from rich.table import Table

    first, last = outcomes[0], outcomes[-1]
    cores = f"{world_size} ranks on {os.cpu_count()} cores, torch {torch.__version__}"
    table = Table(title=cores, title_justify="left")
    table.add_column("backend")
    for column in ("loss", "accuracy", "step, ms", "all_reduce, µs"):
        table.add_column(column, justify="right")
    times = []
    for outcome in outcomes:
        step = statistics.median(outcome.step_seconds)
        reduce = statistics.median(outcome.all_reduce_seconds)
        times.append((step, reduce))
        table.add_row(
            outcome.backend,
            f"{statistics.mean(outcome.losses[-10:]):.6f}",
            f"{outcome.accuracy:.2%}",
            f"{step * 1e3:.2f}",
            f"{reduce * 1e6:.0f}",
        )
    Console().print(table)
    print(
        f"Times are medians of {len(first.step_seconds)} steps and of {len(first.all_reduce_seconds)} all_reduce "
        f"calls of {first.gradient_bytes:,} bytes, the size of all gradients."
    )
    for outcome, (step, reduce) in zip(outcomes[:-1], times, strict=False):
        print(
            f"{outcome.backend} needs {step / times[-1][0]:.2f} of {last.backend}'s time for a step, "
            f"and {reduce / times[-1][1]:.2f} for an all_reduce."
        )


def judge(outcomes: list[Outcome]) -> str | None:
    """Prints how the loss curves compare; returns the problem with the outcomes, or None."""
    first, *others = outcomes
    for outcome in outcomes:
        if outcome.accuracy <= LEAST_ACCURACY:
            return (
                f"{outcome.backend}: {outcome.accuracy:.2%} of the test images recognised, "
                f"not above {LEAST_ACCURACY:.0%}"
            )
    for other in others:
        names = f"The loss curves of {first.backend} and {other.backend}"
        gap = max(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True))
        if first.losses == other.losses:
            print(f"{names} are identical bit for bit over {len(first.losses)} steps.")
        else:
            print(f"{names} differ by at most {gap:.3g} over {len(first.losses)} steps.")
        if not gap <= LOSS_TOLERANCE:
            return f"{names} differ by {gap:.3g}, more than {LOSS_TOLERANCE:g}"
    return None


def missing() -> str | None:
    """Returns a message with the missing packages, or None."""
    needed = {"rich": "rich", "sklearn": "scikit-learn"}
    absent = [package for name, package in needed.items() if not importlib.util.find_spec(name)]
    if not absent:
        return None
    return f"the demo needs {' and '.join(absent)}: pip install {' '.join(absent)}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog=None if __name__ == "__main__" else "fastcoll demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", default="fastcoll", help="default: fastcoll")
    parser.add_argument("--compare", metavar="BACKEND", help="train with this backend too")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start; default: 2")
    parser.add_argument("--epochs", type=int, default=12, help="default: 12")
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank; default: 32")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    return parser.parse_args(arguments)


def main(given: Sequence[str] | None = None) -> str | None:
    """Trains and prints; returns the problem for ``sys.exit``, or None."""
    arguments = parse_arguments(given)
    if problem := missing():
        return problem
    settings = Settings(
        arguments.epochs, arguments.batch_size, arguments.learning_rate, arguments.seed
    )
    if "RANK" in os.environ:
        if arguments.compare:
            return "--compare starts its own ranks: run it without torchrun"
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        outcome = train(arguments.backend, rank, world_size, "env://", settings)
        outcomes = [outcome] if outcome is not None else []
    else:
        world_size = arguments.nproc
        backends = [arguments.backend] + ([arguments.compare] if arguments.compare else [])
        outcomes = [train_in_processes(backend, world_size, settings) for backend in backends]
    if not outcomes:
        return None
    print_table(outcomes, world_size)
    return judge(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
