"""Trains a small network on handwritten digits with DistributedDataParallel, on one backend or on two in turns.

    python examples/ddp_train.py                        two ranks, started by this script
    python examples/ddp_train.py --compare gloo         the same network on gloo too, and a table
    fastcoll demo                                       the same from an installed package
    torchrun --nproc-per-node 2 examples/ddp_train.py   ranks started by torchrun

It needs rich and scikit-learn. The data are the 1,797 images of 8x8 pixels that come with scikit-learn. With
``--compare`` the ranks train one network for each backend, from the same weights. The backends take turns, epoch by
epoch, so the machine's other work slows both alike. Exits with a message if at most 95% of the test images are
recognised, or if the loss curves of two backends differ by more than 0.001.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import resource
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
CALLS = 50  # of all_reduce, timed in turns of 10
QUIET_PERCENT = 10.0
"""While other processes use more of the machine than this, times do not decide which backend is faster."""
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


Advance = Callable[[str, float], None]
"""(backend, loss): a step was taken."""


@contextlib.contextmanager
def progress_bars(backends: Sequence[str], ranks: int, steps: int) -> Iterator[Advance]:
    """Yields a callable that draws a bar for each backend on standard error."""
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
        tasks = {
            name: progress.add_task(f"{name}, {ranks} ranks", total=steps, loss=float("nan"))
            for name in backends
        }
        yield lambda name, loss: progress.update(tasks[name], advance=1, loss=loss)


class Training:
    """A network that learns on one backend, on this rank."""

    def __init__(self, backend: str, group: dist.ProcessGroup, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.backend = backend
        self.losses: list[Tensor] = []
        self.step_seconds: list[float] = []
        self.all_reduce_seconds: list[float] = []
        self._group, self._settings = group, settings
        self._model = DistributedDataParallel(build_model(), process_group=group)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=settings.learning_rate)
        self._learn, self._test = load_digits(settings.seed)
        self._sampler: DistributedSampler[int] = DistributedSampler(self._learn, seed=settings.seed)

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self._settings.epochs * -(-len(self._sampler) // self._settings.batch_size)

    def epoch(self, number: int, advance: Advance) -> None:
        """Takes the steps of one epoch."""
        self._sampler.set_epoch(number)
        for images, labels in batches(self._learn, self._sampler, self._settings.batch_size):
            start = time.perf_counter()
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
            self.step_seconds.append(time.perf_counter() - start)
            self.losses.append(loss.detach())
            advance(self.backend, self.losses[-1].item())

    def time_all_reduce(self, calls: int) -> None:
        """Times calls on a tensor as large as all gradients, which all ranks begin together."""
        tensor = torch.zeros(sum(parameter.numel() for parameter in self._model.parameters()))
        for _ in range(calls):
            dist.barrier(self._group)
            start = time.perf_counter()
            dist.all_reduce(tensor, group=self._group)
            self.all_reduce_seconds.append(time.perf_counter() - start)

    def outcome(self) -> Outcome:
        """Returns the results; all ranks call it."""
        ranks = self._group.size()
        curve = torch.stack(self.losses)
        dist.all_reduce(curve, group=self._group)
        return Outcome(
            backend=self.backend,
            losses=(curve / ranks).tolist(),
            accuracy=self._accuracy(),
            step_seconds=self.step_seconds[WARM_UP_STEPS:],
            all_reduce_seconds=self.all_reduce_seconds,
            gradient_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
        )

    def _accuracy(self) -> float:
        """Returns the share of right answers; each rank tests every so-many-th image."""
        rank, ranks = self._group.rank(), self._group.size()
        images, labels = (tensor[rank::ranks] for tensor in self._test.tensors)
        with torch.no_grad():
            right = (self._model(images).argmax(dim=1) == labels).sum().to(torch.float64)
        dist.all_reduce(right, group=self._group)
        return float(right.item()) / len(self._test)


def train(
    backends: Sequence[str], rank: int, world_size: int, rendezvous: str, settings: Settings
) -> list[Outcome]:
    """Trains on each backend, in turns, as one rank of new process groups; returns the outcome of each."""
    torch.set_num_threads(1)
    first, *others = backends
    dist.init_process_group(first, init_method=rendezvous, rank=rank, world_size=world_size)
    outcomes = fit([first, *others], settings)
    gc.collect()  # DDP and its group form a cycle; gloo's threads would abort the process when Python ends
    dist.destroy_process_group()
    return outcomes


def fit(backends: Sequence[str], settings: Settings) -> list[Outcome]:
    """Trains in the default process group, whose backend is the first one, and in groups of the others."""
    groups = [dist.group.WORLD, *(dist.new_group(backend=name) for name in backends[1:])]
    trainings = [
        Training(name, group, settings) for name, group in zip(backends, groups, strict=True)
    ]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bars = progress_bars(backends, ranks, trainings[0].steps) if rank == 0 else None
    with bars or contextlib.nullcontext(lambda name, loss: None) as advance:
        for epoch in range(settings.epochs):
            for training in in_turn(trainings, epoch):
                training.epoch(epoch, advance)
    for turn in range(5):
        for training in in_turn(trainings, turn):
            training.time_all_reduce(CALLS // 5)
    return [training.outcome() for training in trainings]


def in_turn(trainings: list[Training], turn: int) -> list[Training]:
    """Returns the trainings in the order of a turn; each turn begins with another one."""
    first = turn % len(trainings)
    return trainings[first:] + trainings[:first]


def _rank_main(
    rank: int,
    backends: Sequence[str],
    world_size: int,
    rendezvous: str,
    settings: Settings,
    result: str,
) -> None:
    outcomes = train(backends, rank, world_size, rendezvous, settings)
    if rank == 0:
        torch.save([vars(outcome) for outcome in outcomes], result)


def used_seconds() -> tuple[float, float]:
    """Returns the seconds that all cores were busy since the start, and that this and its ended processes used."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy, sum(each.ru_utime + each.ru_stime for each in ours)


def train_in_processes(
    backends: Sequence[str], world_size: int, settings: Settings
) -> tuple[list[Outcome], float]:
    """Starts the ranks on this machine, and waits for them.

    Returns:
        The outcomes on rank 0, and the percentage of the machine that other processes used meanwhile.
    """
    before, start = used_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder, "outcomes"))
        rendezvous = f"file://{folder}/rendezvous"
        spawn(_rank_main, (backends, world_size, rendezvous, settings, result), nprocs=world_size)
        outcomes = [Outcome(**each) for each in torch.load(result)]
    busy, ours = (now - then for now, then in zip(used_seconds(), before, strict=True))
    machine = (time.monotonic() - start) * (os.cpu_count() or 1)
    return outcomes, max(0.0, 100 * (busy - ours) / machine)


def print_table(outcomes: list[Outcome], world_size: int) -> None:
    """Prints one row for each backend."""
    from rich.console import Console
    from rich.table import Table

    first = outcomes[0]
    cores = f"{world_size} ranks on {os.cpu_count()} cores, torch {torch.__version__}"
    table = Table(title=cores, title_justify="left")
    table.add_column("backend")
    for column in ("loss", "accuracy", "step, ms", "all_reduce, µs"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.backend,
            f"{statistics.mean(outcome.losses[-10:]):.6f}",
            f"{outcome.accuracy:.2%}",
            f"{statistics.median(outcome.step_seconds) * 1e3:.2f}",
            f"{statistics.median(outcome.all_reduce_seconds) * 1e6:.0f}",
        )
    Console().print(table)
    print(
        f"Times are medians of {len(first.step_seconds)} steps and of {len(first.all_reduce_seconds)} all_reduce "
        f"calls of {first.gradient_bytes:,} bytes, the size of all gradients."
    )


def verdict(outcomes: list[Outcome], others_percent: float) -> str:
    """Returns a sentence on whose steps are shorter, or why the times do not decide it."""
    first, last = outcomes
    ours, theirs = (statistics.median(each.step_seconds) * 1e3 for each in outcomes)
    times = f"{ours:.2f} ms a step, {last.backend} {theirs:.2f} ms"
    busy = f"Other processes used {others_percent:.0f}% of the machine"
    if others_percent > QUIET_PERCENT:
        return f"{busy}, so the times decide nothing: {first.backend} took {times}. Run it again when it is idle."
    if ours < theirs:
        return f"{busy}. {first.backend} is {theirs / ours:.2f} times as fast as {last.backend}: {times}."
    return f"{busy}. {first.backend} is not faster than {last.backend} here: {times}."


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
    parser.add_argument("--compare", metavar="BACKEND", help="train on this backend too, in turns")
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
    backends = [arguments.backend, *([arguments.compare] if arguments.compare else [])]
    others_percent = 0.0
    if "RANK" in os.environ:
        if arguments.compare:
            return "--compare starts its own ranks: run it without torchrun"
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        outcomes = train(backends, rank, world_size, "env://", settings)
        if rank > 0:
            return None
    else:
        world_size = arguments.nproc
        outcomes, others_percent = train_in_processes(backends, world_size, settings)
    print_table(outcomes, world_size)
    problem = judge(outcomes)
    if problem is None and len(outcomes) == 2:
        print(verdict(outcomes, others_percent))
    return problem


if __name__ == "__main__":
    raise SystemExit(main())
