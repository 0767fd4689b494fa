"""What a GPU did for a training step: times between events, and every kernel and copy that torch.profiler has seen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = ["CudaClock", "Observed", "StepClock", "observed_in"]

_COLLECTIVES = (
    "nccl",
    "onerankreduce",  # NCCL's at one rank
    "one_shot_kernel",
    "two_shot_kernel",
    "ring_kernel",
    "bucket_kernel",  # copies out too
    "all_gather_kernel",
    "reduce_scatter_kernel",
)
"""What names of kernels that move messages between ranks contain, in lower case."""

_CYCLES_PER_MICROSECOND = 2000  # of a GPU at 2 GHz; slower ones sleep longer, which does no harm


@dataclass(frozen=True)
class Observed:
    """What was done on the device, for one step.

    Attributes:
        kernels: How many ran, those of collectives left out.
        kernel_microseconds: The sum of their times.
        collective_kernels: Those of NCCL, or of fastcoll between ranks.
        collective_microseconds: The sum of their times.
        copies: Copies and fills by the driver.
        copy_microseconds: The sum of their times.
        copy_bytes: What they moved; a copy counts once.
        calls: What the host has called to put them there: launches of kernels and graphs, copies and fills.
    """

    kernels: float = 0.0
    kernel_microseconds: float = 0.0
    collective_kernels: float = 0.0
    collective_microseconds: float = 0.0
    copies: float = 0.0
    copy_microseconds: float = 0.0
    copy_bytes: float = 0.0
    calls: float = 0.0

    def less(self, other: Observed) -> Observed:
        """Returns what is more here than there."""
        theirs = asdict(other)
        return Observed(**{name: value - theirs[name] for name, value in asdict(self).items()})

    @property
    def around_microseconds(self) -> float:
        """Device time of all but the collectives."""
        return self.kernel_microseconds + self.copy_microseconds


def observed_in(events: Iterable[Mapping[str, Any]], steps: int) -> Observed:
    """Returns what a trace of some steps says of one of them.

    Args:
        events: Of torch.profiler's trace in Chrome's format: the list under "traceEvents".
        steps: How many were traced.

    Raises:
        ValueError: The trace has no kernel in it.
    """
    total = {field.name: 0.0 for field in fields(Observed)}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", "")).lower()
        if kind == "kernel":
            which = "collective" if any(part in name for part in _COLLECTIVES) else "kernel"
            total["collective_kernels" if which == "collective" else "kernels"] += 1
            total[f"{which}_microseconds"] += float(event["dur"])
        elif kind in ("gpu_memcpy", "gpu_memset"):
            total["copies"] += 1
            total["copy_microseconds"] += float(event["dur"])
            total["copy_bytes"] += float(event.get("args", {}).get("bytes", 0))
        elif kind in ("cuda_runtime", "cuda_driver"):
            total["calls"] += any(part in name for part in ("launch", "memcpy", "memset"))
    if not total["kernels"] + total["collective_kernels"]:
        raise ValueError("expected kernels in the profiler's trace, got none")
    return Observed(**{name: value / steps for name, value in total.items()})


class StepClock(Protocol):
    """Times a device."""

    def synchronize(self) -> None:
        """Waits for the device."""

    def occupy(self, microseconds: float) -> None:
        """Keeps the current stream busy at least so long, so that what follows is queued before it runs."""

    def mark(self) -> Any:
        """Returns an event that was put on the current stream."""

    def between(self, begin: Any, end: Any) -> float:
        """Returns the microseconds between two marks, waiting for the second."""

    def observe(self, step: Callable[[], object], steps: int) -> Observed:
        """Takes steps under the profiler, and returns what one of them did."""


class CudaClock:
    """That of the current CUDA device."""

    def __init__(self) -> None:
        self._warm = False

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def occupy(self, microseconds: float) -> None:
        """Puts a kernel on the current stream that does nothing for so long."""
        torch.cuda._sleep(int(microseconds * _CYCLES_PER_MICROSECOND))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Records an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Asks the events."""
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def observe(self, step: Callable[[], object], steps: int) -> Observed:
        """Reads the trace that the profiler writes: its other ways to say this differ from release to release."""
        if not self._warm:  # what is traced first lacks kernels
            self._traced(lambda: torch.zeros(1, device="cuda"), 1)
            self._warm = True
        return observed_in(self._traced(step, steps), steps)

    def _traced(self, step: Callable[[], object], steps: int) -> list[dict[str, Any]]:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
        return events
