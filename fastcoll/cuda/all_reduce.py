"""Collectives of one group on one device that kernels may serve: from engine operation to algorithm, plan and launches.

Kernels serve all-reduces, and with FASTCOLL_ALGO=ring also reduce-scatters and all-gathers.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastcoll.buckets import AddressTable, require_apart
from fastcoll.cuda.algorithms import Algorithm, Call
from fastcoll.cuda.algorithms.launches import Piece, PlanContext
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.plans import Part, Placed, Plan, PlanCache, Recent
from fastcoll.cuda.selector import fuses, select
from fastcoll.cuda.symmetric import Region

__all__ = ["AllReduces", "CallOptions", "Task"]

_log = logging.getLogger("fastcoll.cuda")

_ALIGNED = 16  # bytes that kernels load at once
_MOST_WORKSPACES = 16  # streams that keep a workspace
_Chosen = tuple[Algorithm, Call, list[int]]
_left_behind: list[object] = []  # memory that kernels of a failed group may still read

Task = tuple[str, torch.dtype, str, int, int, int]
"""One tensor: collective, dtype, operation, addresses of source and result, this rank's input elements."""


@dataclass(frozen=True)
class CallOptions:
    """Options of an all-reduce beside torch's own arguments; equal on all ranks.

    Attributes:
        wire_dtype: Wire dtype for messages of a wider floating-point dtype; None for their own dtype.
        scale: Factor of the result, applied before rounding.
        algorithm: Name of the algorithm; "" leaves the choice to FASTCOLL_ALGO.
        fuse: Whether to reduce tensors that are passed together as one bucket; None: if they are many and small.
    """

    wire_dtype: torch.dtype | None = None
    scale: float = 1.0
    algorithm: str = ""
    fuse: bool | None = None


_NO_OPTIONS = CallOptions()


class AllReduces:
    """Serves the all-reduces of one group on one device, and the ring's other collectives.

    Launches that work on the peers' memory run one after the other, whatever their streams; the kernels rely on it.

    Args:
        communicator: The NCCL communicator.
        region: Result of ``open_region``: what the ranks agreed on and mapped.
        device: The device as torch names it.
        kernel_device: The device as kernels name it.
        forced: FASTCOLL_ALGO.
        aborted: Whether the group was aborted.
        timeout: Seconds that a kernel waits for a peer; see below.

    Attributes:
        timeout: May be set by any thread; takes effect with the next call.
        region: As given.
        plans: Plans to repeat.
        is_recording: Whether a stream (None: the current one) is being captured into a graph.
        chosen: Name of the last call's algorithm, for tests and tools.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        region: Region,
        device: torch.device,
        kernel_device: torch.device,
        forced: str,
        aborted: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.timeout = self._timeout = timeout
        self.region = region
        self.plans = PlanCache()
        self.is_recording = _is_captured if device.type == "cuda" else _is_never_captured
        self.chosen = ""
        self._communicator = communicator
        self._device = device
        self._kernel_device = kernel_device
        self._forced = forced
        self._aborted = aborted
        self._workspaces: Recent[Tensor] = Recent(_MOST_WORKSPACES)
        # Stream of the last launch with peers: one entry for captured launches and one for others, because captured
        # and immediate launches do not order each other.
        self._last: dict[bool, torch.Stream] = {}

    @property
    def kernel_bytes(self) -> int:
        """Size of the largest all-reduce without options that a kernel may serve; 0: NCCL serves all of them."""
        topology = self.region.topology
        if self._forced in ("auto", "nccl"):
            if not topology.kernels:
                return 0
            if self._forced == "nccl" or not topology.peers or topology.ranks == 1:
                return 1  # lists are fused by kernels, tensors are not
            return max(self.region.thresholds.kernel_bytes, 1)
        return sys.maxsize

    def serve(
        self, tasks: Sequence[Task], stream: int, options: CallOptions = _NO_OPTIONS
    ) -> list[int] | None:
        """Puts the collectives that kernels serve on the current stream.

        Args:
            tasks: Issued together, in no guaranteed order.
            stream: Handle of the current stream.
            options: Apply to all tasks.

        Returns:
            Indices of the tasks left for NCCL to issue unchanged; None: all tasks, whatever their tensors' addresses.

        Raises:
            ValueError: The forced algorithm, or any algorithm, cannot serve a call; nothing was put on the stream.
            DistBackendError: NCCL failed, or the group was aborted.
        """
        recording = self.is_recording(None)
        if self.timeout != self._timeout and not recording:
            self._take_timeout()
        exact = (tuple(tasks), stream, options)
        run = self.plans.lists.find(exact)
        if run is None:
            kinds = tuple([
                (collective, dtype, op, count, (source | out) % _ALIGNED, source == out)
                for collective, dtype, op, source, out, count in tasks
            ])  # fmt: skip
            plan = self.plans.find((kinds, stream, options))
            if plan is None:
                chosen, left = self._chosen(tasks, options)
                if not chosen:
                    return None
                workspace = functools.partial(self._workspace, stream=stream, recording=recording)
                plan = Plan(self._prepared(chosen, tasks, workspace, stream), left)
                self.plans.add((kinds, stream, options), plan)
            run = self._placed(plan, tasks)
            if run.tables:
                self.plans.lists.add(exact, run)
        plan = run.plan
        if recording:
            self.plans.pin(run if run.tables else plan)
        if plan.uses_peers:
            self._follow(recording)
        plan.run(run.places)
        return plan.left

    def compile(self, tasks: Sequence[Task], options: CallOptions) -> bool:
        """Compiles the kernels that ``serve`` would launch; from any thread.

        The prepared launches are dropped, because a launch belongs to a stream and only ``serve`` has the stream.

        Returns:
            Whether ``serve`` has anything to do; if not, NCCL serves such tasks at any address.
        """
        try:
            chosen, _ = self._chosen(tasks, options)
            self._prepared(chosen, tasks, self._new_memory, 0)
        except Exception:  # the call itself raises it, where it is made
            return True
        return bool(chosen)

    def close(self) -> None:
        """Frees the regions; a failed group's regions stay, because a kernel may still use them."""
        peers = self.region.peers
        if peers is not None:
            peers.close()
            if self._aborted():
                _left_behind.append((peers, self.plans))
                self.plans = PlanCache()
            else:
                peers.free()
        self.plans.clear()
        self._workspaces.clear()
        self.region = replace(self.region, peers=None)

    def _take_timeout(self) -> None:
        self._timeout = self.timeout
        if self.region.peers is not None:
            self.region.peers.limit_waits(self._timeout)
        self.plans.forget()

    def _chosen(
        self, tasks: Sequence[Task], options: CallOptions
    ) -> tuple[list[_Chosen], list[int]]:
        """Returns algorithm, call and tasks of each call for kernels, and the tasks left to NCCL."""
        chosen: list[_Chosen] = []
        left: list[int] = []
        for call, indices in self._calls(tasks, options):
            algorithm = self._choose(call, options)
            self.chosen = algorithm.name
            if algorithm.name == "nccl" and call.is_plain:
                left += indices
            else:
                chosen.append((algorithm, call, indices))
        return chosen, left

    def _calls(self, tasks: Sequence[Task], options: CallOptions) -> list[tuple[Call, list[int]]]:
        """Returns the tasks as calls: one for each task, or one list for all-reduces of one dtype and operation."""
        by_type: dict[tuple[str, torch.dtype, str], list[int]] = {}
        for index, (collective, dtype, op, *_) in enumerate(tasks):
            by_type.setdefault((collective, dtype, op), []).append(index)
        calls: list[tuple[Call, list[int]]] = []
        for (collective, dtype, op), indices in by_type.items():
            sizes = tuple(tasks[index][5] for index in indices)
            together = _call(collective, dtype, op, sizes, options)
            fused = options.fuse and collective == "all_reduce"
            if options.fuse is None and collective == "all_reduce":
                forced = options.algorithm or self._forced
                fused = fuses(sizes, together, self.region.topology, self.region.thresholds, forced)
            if fused and len(sizes) > 1 and self._serves(together, options):
                calls.append((together, indices))
            else:
                calls += [
                    (_call(collective, dtype, op, (size,), options), [index])
                    for size, index in zip(sizes, indices, strict=True)
                ]
        return calls

    def _serves(self, call: Call, options: CallOptions) -> bool:
        """Whether a list can be reduced as one bucket; if not, each tensor is reduced by itself."""
        try:
            self._choose(call, options)
        except ValueError:
            return False
        return True

    def _choose(self, call: Call, options: CallOptions) -> Algorithm:
        forced = options.algorithm or self._forced
        try:
            return select(call, self.region.topology, self.region.thresholds, forced)
        except ValueError as error:
            raise ValueError(self._communicator.member.says(call.collective, str(error))) from None

    def _prepared(
        self,
        chosen: Sequence[_Chosen],
        tasks: Sequence[Task],
        workspace: Callable[[int], Tensor],
        stream: int,
    ) -> list[Part]:
        context = PlanContext(
            self._communicator, stream, self._kernel_device, self.region.peers, workspace
        )
        parts = []
        for algorithm, call, indices in chosen:
            pieces = tuple(Piece(*tasks[index][3:]) for index in indices)
            prepared = algorithm.prepare(call, pieces, context)
            parts.append(Part(algorithm, call, tuple(indices), prepared))
        return parts

    def _placed(self, plan: Plan, tasks: Sequence[Task]) -> Placed:
        """Returns a plan with its tensors' addresses, in tables if the plan reads tables."""
        places: list[tuple[int, int]] = []
        tables: list[Tensor] = []
        for part in plan.parts:
            if not part.prepared.tables:
                places.append(tasks[part.indices[0]][3:5])
                continue
            call = part.call
            sources = [tasks[index][3] for index in part.indices]
            outs = [tasks[index][4] for index in part.indices]
            require_apart(call.sizes, outs, call.dtype.itemsize, "tensors")
            read = AddressTable(self._kernel_device).refresh(sources)
            written = AddressTable(self._kernel_device).refresh(outs) if outs != sources else read
            places.append((read.data_ptr(), written.data_ptr()))
            tables += (read, written)
        return Placed(plan, tuple(places), tuple(tables))

    def _new_memory(self, size: int) -> Tensor:
        return torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)

    def _workspace(self, size: int, stream: int, recording: bool) -> Tensor:
        """Returns memory that the calls on a stream use in turn; each user holds it, so it may be replaced.

        A replacement drops the plans that hold a smaller workspace; otherwise each would keep its own alive.
        """
        known = self._workspaces.find(stream)
        if known is not None and known.numel() >= size:
            return known
        made = self._new_memory(size)
        if not recording:  # else it belongs to the graph
            if known is not None:
                self.plans.forget()
            self._workspaces.add(stream, made)
        return made

    def _follow(self, recording: bool) -> None:
        """Makes the current stream wait for the stream of the previous launch, if they differ."""
        current = torch.accelerator.current_stream(self._device)
        last = self._last.get(recording)
        self._last[recording] = current
        if last is None or last == current:
            return
        # Captured work does not wait for work outside the graph, nor the reverse: the user decides when a graph runs.
        if recording and not self.is_recording(last):
            return
        current.wait_stream(last)


def _is_captured(stream: torch.Stream | None) -> bool:
    if stream is None:
        return torch.cuda.is_current_stream_capturing()
    with stream:
        return torch.cuda.is_current_stream_capturing()


def _is_never_captured(stream: torch.Stream | None) -> bool:
    return False


def _call(
    collective: str, dtype: torch.dtype, op: str, sizes: tuple[int, ...], options: CallOptions
) -> Call:
    wire = options.wire_dtype
    if wire is not None and (not dtype.is_floating_point or wire.itemsize >= dtype.itemsize):
        wire = None
    return Call(dtype, op, sizes, wire, options.scale, collective)
