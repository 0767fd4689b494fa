"""Ways to train one model take turns, and each is timed: on the host, on the device, and by the profiler.

A way that fails, or whose gradients are wrong, is left out and told, and the others are measured.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fastcoll.bench.attachments import Attached
from fastcoll.bench.gradients import EmulatedModel
from fastcoll.bench.step_clock import Observed, StepClock
from fastcoll.bench.step_paths import StepPath, blocks_of, local_gradient
from fastcoll.bench.timing import summarise

__all__ = ["Candidate", "Chain", "Measurement", "Settings", "Shape", "measure_copy"]

_VALUES = 97  # different gradients, all of which bfloat16 has
_BLOCK = 25 << 20  # bytes of a block that FSDP shards

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """How long is measured.

    Attributes:
        rounds: Turns of each way.
        steps: Steps of a turn, of each kind.
        warmup: Steps of a turn before: plans are made for where its gradients lie now.
        traced: Steps under the profiler.
        seconds: No round begins after that.
    """

    rounds: int = 12
    steps: int = 3
    warmup: int = 4
    traced: int = 3
    seconds: float = 120.0


class Chain(nn.Module):
    """A model in blocks, each of which FSDP can shard by itself."""

    def __init__(self, blocks: Sequence[EmulatedModel]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, carry: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a scalar that depends on every parameter."""
        for block in self.blocks:
            carry = block(carry)
        assert carry is not None
        return carry


@dataclass
class Candidate:
    """A way to train, ready to be timed.

    Attributes:
        path: Which.
        module: Its model.
        attached: What is called.
        expected: Of every gradient, in order.
        samples: Microseconds by kind: of the host until the backward pass returns ("backward") and until all is queued
            ("host"), and of the device.
        observed: By the profiler.
        plans: Plans that fastcoll made in timed steps: a step that makes some is slower.
    """

    path: StepPath
    module: nn.Module
    attached: Attached
    expected: Sequence[float]
    samples: dict[str, list[float]] = field(
        default_factory=lambda: {"backward": [], "host": [], "device": []}
    )
    observed: Observed | None = None
    plans: int = 0

    def prepare(self) -> torch.Tensor:
        """Drops the gradients of the step before, and returns the loss of the next."""
        self.module.zero_grad(set_to_none=not self.path.kept)
        loss: torch.Tensor = self.attached.module(None)  # FSDP2 of torch 2.11 needs an argument
        return loss

    def step(self) -> None:
        """Takes a step."""
        self.prepare().backward()  # type: ignore[no-untyped-call]
        self.attached.after()

    def wrong(self) -> int:
        """Returns how many elements of the gradients are not what they should be."""
        count = 0
        for parameter, value in zip(self.module.parameters(), self.expected, strict=True):
            grad = local_gradient(parameter)
            count += parameter.numel() if grad is None else int((grad != value).sum())
        return count


def _values(count: int) -> list[float]:
    return [float(1 + index % _VALUES) for index in range(count)]


def _model(path: StepPath, shapes: Sequence[Shape], memory: torch.Tensor) -> nn.Module:
    values = _values(len(shapes))
    if not path.blocks:
        return EmulatedModel(shapes, memory, values, 0.0)
    parts, at, done = [], 0, 0
    for block in blocks_of(shapes, _BLOCK):
        parts.append(EmulatedModel(block, memory[done:], values[at : at + len(block)], 0.0))
        at += len(block)
        done += sum(map(math.prod, block))
    return Chain(parts)


def _plans_built() -> int:
    from fastcoll.cuda.engine import engines

    return sum(one.plans.built for engine in engines() for one in engine.all_reduces.values())


class Measurement:
    """All ways to train one model; what fails is left out and told, and the others are measured.

    Args:
        device: Where.
        clock: Its.
        settings: How long.

    Attributes:
        candidates: By name.
        failed: By name, what went wrong.
    """

    def __init__(self, device: torch.device, clock: StepClock, settings: Settings) -> None:
        self._device = device
        self._clock = clock
        self._settings = settings
        self.candidates: dict[str, Candidate] = {}
        self.failed: dict[str, str] = {}

    def build(self, paths: Sequence[StepPath], shapes: Sequence[Shape]) -> None:
        """Makes the models, which share their parameters' memory, and takes their first steps."""
        memory = torch.zeros(sum(map(math.prod, shapes)), device=self._device)
        for path in paths:
            with self._failing(path.name):
                module = _model(path, shapes, memory)
                attached = path.attach(module)
                made = Candidate(path, module, attached, _values(len(shapes)))
                for _ in range(self._settings.warmup):
                    made.step()
                self._clock.synchronize()
                self.candidates[path.name] = made
        self.verify()

    def verify(self) -> None:
        """Leaves out what has wrong gradients."""
        for name, candidate in list(self.candidates.items()):
            with self._failing(name):
                candidate.step()
                self._clock.synchronize()
                if wrong := candidate.wrong():
                    raise ArithmeticError(f"{wrong} elements of the gradients are wrong")

    def observe(self) -> None:
        """Looks at some steps of each by the profiler; where that fails the times stand without."""
        for name, candidate in self.candidates.items():
            try:
                for _ in range(self._settings.warmup):
                    candidate.step()
                candidate.observed = self._clock.observe(candidate.step, self._settings.traced)
            except Exception:
                self.failed[f"{name}, profiler"] = traceback.format_exc()

    def time(self) -> None:
        """Takes turns until rounds or seconds are over."""
        stop = time.monotonic() + self._settings.seconds
        gc.collect()
        gc.freeze()
        gc.disable()  # no step is longer for it; between rounds it runs
        try:
            for turn in range(self._settings.rounds):
                if turn and time.monotonic() > stop:
                    return
                gc.collect()
                names = list(self.candidates)
                first = turn % max(len(names), 1)
                for name in names[first:] + names[:first]:
                    with self._failing(name):
                        self._turn(self.candidates[name])
        finally:
            gc.enable()
            gc.unfreeze()

    def _turn(self, candidate: Candidate) -> None:
        for _ in range(self._settings.warmup):
            candidate.step()
        before = _plans_built()
        for _ in range(self._settings.steps):
            loss = candidate.prepare()
            self._clock.synchronize()
            begin = time.perf_counter_ns()
            loss.backward()  # type: ignore[no-untyped-call]
            middle = time.perf_counter_ns()
            candidate.attached.after()
            end = time.perf_counter_ns()
            candidate.samples["backward"].append((middle - begin) / 1e3)
            candidate.samples["host"].append((end - begin) / 1e3)
        # Half as much again as the host takes, so that the device never waits for it.
        ahead = 1.5 * max(candidate.samples["host"][-self._settings.steps :]) + 200
        for _ in range(self._settings.steps):
            loss = candidate.prepare()
            self._clock.synchronize()
            self._clock.occupy(ahead)
            start = self._clock.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            candidate.attached.after()
            candidate.samples["device"].append(self._clock.between(start, self._clock.mark()))
        candidate.plans += _plans_built() - before

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed[name] = traceback.format_exc()
            self.candidates.pop(name, None)


def measure_copy(device: torch.device, clock: StepClock, size: int) -> float:
    """Returns the bytes that a copy on the device reads and writes in a microsecond: the median of 20 of them."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(23):
        clock.occupy(20)
        begin = clock.mark()
        target.copy_(source)
        samples.append(clock.between(begin, clock.mark()))
    return 2 * size / summarise(samples[3:]).median
