"""Collectives of one group on one device that kernels may serve: from engine operation to algorithm, plan and launches.

Kernels serve all-reduces. With FASTCOLL_ALGO=ring they also serve reduce-scatters and all-gathers, and with
FASTCOLL_ORDER=fixed reduces and reduce-scatters.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fastcoll._load_cuda import CUDA
from fastcoll._wires import wire_of
from fastcoll.buckets import address_table, require_apart
from fastcoll.cuda.algorithms import Algorithm, Call
from fastcoll.cuda.algorithms.call import depends_on_order
from fastcoll.cuda.algorithms.launches import Piece, PlanContext
from fastcoll.cuda.errors import Member
from fastcoll.cuda.selector import buckets, fuses, select
from fastcoll.cuda.symmetric import Region

__all__ = ["AllReduces", "CallOptions", "Task"]

_MOST_WORKSPACES = 16  # streams that keep a workspace
_MOST_MEASURED = 256  # lists: several times the buckets of a model
_Chosen = tuple[Algorithm, Call, list[int]]
_Kind = tuple[str, torch.dtype, str, int, float | None]
_left_behind: list[object] = []  # memory that kernels of a failed group may still read

Task = tuple[str, torch.dtype, str, int, float | None, int, int, int]
"""One tensor: collective, dtype, operation, root or -1, PREMUL_SUM's factor (None: on the device), addresses of source
and result, this rank's input elements."""


class CallOptions(NamedTuple):
    """Options of an all-reduce beside torch's own arguments; equal on all ranks.

    Attributes:
        wire_dtype: Wire dtype for messages of a wider floating-point dtype; None for their own dtype.
        scale: Factor of the result, applied before rounding.
        algorithm: Name of the algorithm; "" leaves the choice to FASTCOLL_ALGO.
        fuse: Whether to reduce tensors that are passed together as one bucket; None: if they are many and small, or
            have a narrower wire.
        measure: Whether kernels sum the squares of results that they write on all ranks; see ``AllReduces.measured``.
    """

    wire_dtype: torch.dtype | None = None
    scale: float = 1.0
    algorithm: str = ""
    fuse: bool | None = None
    measure: bool = False


@dataclass(eq=False, repr=False)
class AllReduces:
    """Plans the all-reduces of one group on one device, and the ring's other collectives.

    C++ repeats the plans (csrc/cuda/plans.hpp). Launches that work on the peers' memory run one after the other,
    whatever their streams; the kernels rely on it.

    Attributes:
        member: This rank and the group.
        region: Result of ``open_region``: what the ranks agreed on and mapped.
        device: The device as torch names it.
        kernel_device: The device as kernels name it.
        forced: FASTCOLL_ALGO.
        fixed: Whether sums are taken in a fixed order.
        aborted: Whether the group was aborted.
        timeout: Seconds that a kernel waits for a peer. May be set by any thread; takes effect with the next plan.
        plans: Plans to repeat.
        chosen: Name of the last planned call's algorithm, for tests and tools.
    """

    member: Member
    region: Region
    device: torch.device
    kernel_device: torch.device
    forced: str
    fixed: bool
    aborted: Callable[[], bool]
    timeout: float

    def __post_init__(self) -> None:
        self.chosen = ""
        self._timeout = self.timeout
        self._voting = threading.Lock()
        self._measured: dict[object, tuple[int, list[int]]] = {}
        self._workspaces: OrderedDict[int, Tensor] = OrderedDict()  # the most recently used last
        # By stream and capture; held by the plans, which go with their graph.
        self._captured: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self.plans = CUDA.Plans(self._kernel_bytes(), self.region.thresholds.limits)

    def _kernel_bytes(self) -> int:
        """Returns the size of the largest all-reduce without options that a kernel may serve; 0: NCCL serves all."""
        topology = self.region.topology
        if self.forced in ("auto", "nccl") and not self.fixed:
            if not topology.kernels and self.region.vote is None:
                return 0
            if self.forced == "nccl" or not topology.peers or topology.ranks == 1:
                return 1  # lists are fused by kernels, tensors are not
            return max(self.region.thresholds.kernel_bytes, 1)
        return sys.maxsize

    def plan(
        self, tasks: Sequence[Task], given: tuple[Any, ...], stream: int, capture: int
    ) -> CUDA.Plan | None:
        """Returns the plan for collectives on the current stream.

        Args:
            tasks: Issued together, in no guaranteed order.
            given: The fields of ``CallOptions``, which apply to all tasks; () for none.
            stream: Handle of the current stream.
            capture: Id of the stream's capture into a graph; 0: none.

        Returns:
            The plan; None: NCCL serves all such tasks, whatever their tensors' addresses.

        Raises:
            ValueError: The forced algorithm, or any algorithm, cannot serve a call. Or the group's first call for
                kernels is captured.
        """
        if capture and self.region.vote is not None and self._for_kernels(tasks, given):
            raise ValueError(
                "the group's first call with a list of tensors, with options or in fixed order on a device compiles "
                "kernels, which cannot be captured into a graph. Make one such call before the capture."
            )
        if self.timeout != self._timeout:
            self._timeout = self.timeout
            if self.region.peers is not None:
                self.region.peers.limit_waits(self._timeout)
            self.plans.forget()
        options = CallOptions(*given)
        chosen, left = self._chosen(tasks, options)
        if not chosen:
            return None
        workspace = functools.partial(self._workspace, stream=stream, capture=capture)
        parts, of_count = self._prepared(chosen, tasks, workspace, options.measure)
        uses_peers = any(algorithm.uses_peers for algorithm, _, _ in chosen)
        return CUDA.Plan(parts, left, uses_peers, of_count and len(tasks) == 1)

    def measured(
        self, sizes: tuple[int, ...], dtype: torch.dtype, op: str, wire: torch.dtype | None
    ) -> tuple[int, list[int]]:
        """Returns how kernels measure an all-reduce of tensors of these sizes; equal on all ranks.

        Returns:
            The number of sums of squares that they write, and the indices of the tensors that these leave out, because
            no kernel writes them.
        """
        key = (sizes, dtype, op, wire)
        if (known := self._measured.get(key)) is not None:
            return known
        there = [index for index, size in enumerate(sizes) if size]
        tasks: list[Task] = [
            ("all_reduce", dtype, op, -1, 1.0, 0, 0, sizes[index]) for index in there
        ]
        count, left = 0, set(there)
        try:
            for algorithm, call, indices in self._algorithms(tasks, CallOptions(wire)):
                if sums := algorithm.measured(call, self.region.topology):
                    count += sums
                    left -= {there[index] for index in indices}
        except ValueError:  # no algorithm: the call itself raises it
            return 0, there
        if len(self._measured) >= _MOST_MEASURED:
            self._measured.clear()
        return self._measured.setdefault(key, (count, sorted(left)))

    def norm(self, squares: Tensor, result: Tensor, max_norm: float, epsilon: float) -> None:
        """Launches the kernel of fastcoll.kernels.norm on the current stream.

        Args:
            squares: Sums of squares: float64 [any], on the device.
            result: float64 [2], on the device: the norm, and the bits of two float32, divisor and found_inf.
            max_norm: As for ``prepare_norm``.
            epsilon: As for ``prepare_norm``.
        """
        from fastcoll.kernels.norm import prepare_norm

        sums = squares.data_ptr(), squares.numel()
        prepare_norm(*sums, result.data_ptr(), max_norm, epsilon, self.kernel_device)()

    def tables(self, tasks: Sequence[Task]) -> tuple[int, int, object]:
        """Returns the addresses of two tables on the device, and what holds them.

        Args:
            tasks: Tensors of one dtype: the tables have the addresses of their sources and of their results.

        Raises:
            ValueError: Results overlap.
        """
        _, dtype, _, _, _, sources, outs, sizes = zip(*tasks, strict=True)
        require_apart(sizes, outs, dtype[0].itemsize, "tensors")
        read = address_table(sources, self.kernel_device)
        written = read
        if outs != sources:
            written = address_table(outs, self.kernel_device)
        return read.data_ptr(), written.data_ptr(), (read, written)

    def has_kernels(self) -> bool:
        """Returns whether kernels run on all ranks, which agree on that first; each calls it at the same place.

        Raises:
            DistBackendError: A rank did not arrive in time or died, or the group was aborted.
        """
        with self._voting:
            if self.region.vote is not None:
                self.region = replace(self.region, topology=self.region.vote(), vote=None)
        return self.region.topology.kernels

    def compile(self, tasks: Sequence[Task], given: tuple[Any, ...]) -> bool:
        """Compiles the kernels that such a plan launches; from any thread, before a call that is not captured.

        The steps are dropped, because a plan belongs to a stream and only ``plan`` has the stream.

        Returns:
            Whether there is a plan; if not, NCCL serves such tasks at any address.

        Raises:
            DistBackendError: The ranks could not agree whether kernels run on all of them.
        """
        if self._for_kernels(tasks, given):
            self.has_kernels()
        try:
            options = CallOptions(*given)
            chosen, _ = self._chosen(tasks, options)
            self._prepared(chosen, tasks, self._new_memory, options.measure)
        except Exception:  # the call itself raises it, where it is made
            return True
        return bool(chosen)

    def _for_kernels(self, tasks: Sequence[Task], given: tuple[Any, ...]) -> bool:
        """Returns whether kernels may serve these tasks where the ranks map no memory."""
        fixed = self.fixed and any(depends_on_order(dtype, op) for _, dtype, op, *_ in tasks)
        return fixed or len(tasks) > 1 or bool(given)

    def close(self) -> None:
        """Frees the regions; a failed group's regions stay, because a kernel may still use them."""
        peers = self.region.peers
        if peers is not None:
            peers.close()
            if self.aborted():
                _left_behind.append((peers, self.plans))
                self.plans = CUDA.Plans(0, [])
            else:
                peers.free()
        self.plans.clear()
        self._workspaces.clear()
        self.region = replace(self.region, peers=None)

    def _chosen(
        self, tasks: Sequence[Task], options: CallOptions
    ) -> tuple[list[_Chosen], list[int]]:
        """Returns algorithm, call and tasks of each call for kernels, and the tasks left to NCCL."""
        chosen: list[_Chosen] = []
        left: list[int] = []
        for algorithm, call, indices in self._algorithms(tasks, options):
            self.chosen = algorithm.name
            if algorithm.name == "nccl" and call.is_plain:
                left += indices
            else:
                chosen.append((algorithm, call, indices))
        return chosen, left

    def _algorithms(self, tasks: Sequence[Task], options: CallOptions) -> Iterator[_Chosen]:
        """Yields the tasks as calls: one for each task, or lists of all-reduces of one dtype and operation."""
        by_type: dict[_Kind, list[int]] = {}
        for index, task in enumerate(tasks):
            by_type.setdefault(task[:5], []).append(index)
        for (collective, dtype, op, root, premul), indices in by_type.items():
            sizes, wire = tuple(tasks[i][7] for i in indices), wire_of(dtype, options.wire_dtype)
            whole = Call(dtype, op, sizes, wire, options.scale, collective, root, premul)
            parts = [slice(None)] if options.fuse else buckets(whole, self.region.topology)
            for part in parts:
                together = replace(whole, sizes=whole.sizes[part])
                if self._fuses(together, options):
                    yield self._choose(together, options), together, indices[part]
                    continue
                for size, index in zip(together.sizes, indices[part], strict=True):
                    alone = replace(whole, sizes=(size,))
                    yield self._choose(alone, options), alone, [index]

    def _fuses(self, call: Call, options: CallOptions) -> bool:
        """Whether a list is reduced as one bucket; if not, each tensor is reduced by itself."""
        if not call.is_list or call.collective != "all_reduce" or options.fuse is False:
            return False
        try:
            algorithm = self._choose(call, options).name
        except ValueError:
            return False
        region, forced = self.region, options.algorithm or self.forced
        return bool(options.fuse) or fuses(
            call, algorithm, region.topology, region.thresholds, forced
        )

    def _choose(self, call: Call, options: CallOptions) -> Algorithm:
        region, forced = self.region, options.algorithm or self.forced
        return select(call, region.topology, region.thresholds, forced, self.fixed)

    def _prepared(
        self,
        chosen: Sequence[_Chosen],
        tasks: Sequence[Task],
        workspace: Callable[[int], Tensor],
        measure: bool,
    ) -> tuple[list[CUDA.PlanPart], bool]:
        """Returns the parts of a plan, and whether it serves these numbers of elements only."""
        context = PlanContext(self.member, self.kernel_device, self.region.peers, workspace)
        parts, of_count, squares = [], False, 0
        for algorithm, call, indices in chosen:
            pieces = tuple(Piece(*tasks[index][5:]) for index in indices)
            sums = algorithm.measured(call, self.region.topology) if measure else 0
            at = squares if sums else None
            made = algorithm.prepare(call, pieces, replace(context, squares=at))
            squares += sums * torch.float64.itemsize
            of_count = of_count or made.of_count
            parts.append(
                CUDA.PlanPart(algorithm.name, indices, list(made.steps), made.tables, made.held)
            )
        return parts, of_count

    def _new_memory(self, size: int) -> Tensor:
        return torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)

    def _workspace(self, size: int, stream: int, capture: int) -> Tensor:
        """Returns memory that the calls on a stream use in turn; each user holds it, so it may be replaced.

        Each graph has its own, because it may be replayed on another stream. A replacement drops the plans that hold a
        smaller workspace, unless a graph has captured them; otherwise each would keep its own alive.
        """
        key = (stream, capture)
        known = self._captured.get(key) if capture else self._workspaces.get(stream)
        if known is None or known.numel() < size:
            if known is not None and not capture:
                self.plans.forget()
            known = self._new_memory(size)
        if capture:
            self._captured[key] = known
            return known
        self._workspaces[stream] = known
        self._workspaces.move_to_end(stream)
        if len(self._workspaces) > _MOST_WORKSPACES:
            self._workspaces.popitem(last=False)
        return known
