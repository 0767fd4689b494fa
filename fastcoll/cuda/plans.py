"""What was prepared once for a call and is repeated when the same call comes again; some of it as a CUDA graph.

A key holds all that a plan depends on: collectives, dtypes, addresses, sizes, options and the stream. A tensor that
moved makes another key, so no plan is ever run for memory that it was not made for; one that was freed and made anew
at the same place is the same to a launch. Plans that are no longer used are dropped, the oldest first.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from fastcoll.cuda.algorithms.algorithm import Launch, Prepared

__all__ = ["CAPTURE_AFTER", "MOST_PLANS", "CudaGraphs", "Plan", "PlanCache", "Recorder"]

_log = logging.getLogger("fastcoll.cuda")

CAPTURE_AFTER = 3
"""Uses of a plan before it is captured: a step that is not repeated is not worth the capture."""

MOST_PLANS = 256
"""Plans that a group keeps for a device: the buckets and lists of a model, some times over."""


class Recorder(Protocol):
    """Turns launches into one that repeats them."""

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Returns it, or None where the current stream cannot be captured; nothing runs yet."""

    def is_recording(self, stream: torch.Stream | None = None) -> bool:
        """Whether a stream, the current one if none is given, is being captured by somebody else."""


class CudaGraphs:
    """Captures on the current stream, and replays there: prepared launches belong to a stream.

    The default stream cannot be captured. Other threads may go on to allocate and to ask events meanwhile: the capture
    is strict with its own thread only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Returns the replay of a graph; None on the default stream, and where the capture failed, which is logged."""
        if torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device):
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:  # nothing was launched: it can be without a graph
            _log.warning(
                "fastcoll: a plan of %d launches is not captured: %s", len(launches), error
            )
            return None
        return graph.replay

    def is_recording(self, stream: torch.Stream | None = None) -> bool:
        """Whether a stream, the current one if none is given, is being captured."""
        if stream is None:
            return torch.cuda.is_current_stream_capturing()
        with stream:
            return torch.cuda.is_current_stream_capturing()


class Plan:
    """The launches of a call, and what they have become.

    Attributes:
        prepared: As the algorithms made it.
        left: Which of the caller's tasks are none of it.
        uses: How often it was run.
        is_captured: Whether it runs as one graph.
    """

    def __init__(self, prepared: Prepared, left: list[int] | None = None) -> None:
        self.prepared = prepared
        self.left = left or []
        self.uses = 0
        self.is_captured = False
        self._is_tried = len(prepared.launches) < 2 or prepared.uses_nccl
        self._launches = prepared.launches

    def run(self, recorder: Recorder | None) -> None:
        """Puts the launches on the current stream.

        Calls of NCCL are never captured here: NCCL lets ranks agree on things when it is captured, so that all of them
        would have to do so at the same call, and how often addresses repeat is each rank's own.

        Args:
            recorder: What captures; None: nothing does, nor is a capture replayed, as the user may be capturing the
                current stream, where CUDA refuses a graph.
        """
        self.uses += 1
        if recorder is not None and self.uses >= CAPTURE_AFTER and not self._is_tried:
            self._is_tried = True
            replay = recorder.record(self._launches)
            if replay is not None:
                self._launches = (replay,)
                self.is_captured = True
        for launch in self.prepared.launches if recorder is None else self._launches:
            launch()


class PlanCache:
    """Plans by key.

    Args:
        most: How many are kept.

    Attributes:
        built: How many were made so far.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._most = most
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._pinned: list[Plan] = []
        self.built = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Hashable) -> Plan | None:
        """Returns a plan, which is then the last to be dropped."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def add(
        self, key: Hashable, build: Callable[[], Prepared], left: list[int] | None = None
    ) -> Plan:
        """Makes a plan and returns it."""
        plan = self._plans[key] = Plan(build(), left)
        self.built += 1
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)
        return plan

    def pin(self, plan: Plan) -> None:
        """Keeps a plan that a graph of the user's has captured: what its launches read must live as long."""
        if plan not in self._pinned:
            self._pinned.append(plan)

    def clear(self) -> None:
        """Drops all plans."""
        self._plans.clear()
        self._pinned.clear()
