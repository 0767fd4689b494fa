"""A process group whose collectives return at once and reduce nothing: to see what surrounds them, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["FusingGroup", "ImmediateGroup", "immediate_group"]


class ImmediateGroup(dist.ProcessGroup):
    """Rank 0 of as many ranks as asked for, which all do as it does; nothing is reduced."""

    NAME = "fastcoll_bench_immediate"

    def _get_backend(self, device: torch.device) -> ImmediateGroup:  # type: ignore[override]
        """Returns itself: what a group does is done by its backend."""
        return self

    def _done(self, result: Any) -> dist.Work:
        future: Future[Any] = Future()
        future.set_result(result)
        work: dist.Work = _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Leaves the tensors as they are."""
        return self._done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Leaves the tensors as they are."""
        return self._done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gives each output this rank's input, for DDP compares; no dispatch mode sees it."""
        with _disable_current_modes():
            for of_ranks, own in zip(outputs, inputs, strict=True):
                for output in of_ranks:
                    output.copy_(own)
        return self._done(outputs)

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> dist.Work:
        """Does so for an output that holds all ranks' parts, which torch 2.15 gathers objects into."""
        return self.allgather([output.chunk(self.size())], [own], opts)

    def alltoall_base(
        self, output: Any, source: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Leaves the output as it is."""
        return self._done([output])

    def getBackendName(self) -> str:
        """Returns the name it is registered under."""
        return self.NAME


class FusingGroup(ImmediateGroup):
    """One that has fastcoll's collective for gradients, as its CPU backend does."""

    NAME = "fastcoll_bench_fusing"

    def name(self) -> str:
        """Returns the name by which the hooks know a backend with such a collective."""
        return "fastcoll"

    def transport(self) -> str:
        """Returns that of ranks on other hosts: they take no core of this one."""
        return "gloo"

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Tells that no other rank can read it."""
        return False

    def all_reduce_fused(
        self, tensors: Any, op: Any, wire_dtype: Any, squares: Any, async_op: bool = False
    ) -> dist.Work:
        """Leaves the tensors as they are."""
        return self._done(tensors)


@contextlib.contextmanager
def immediate_group(ranks: int, fusing: bool = False) -> Iterator[None]:
    """Makes it the default group for a while.

    Args:
        ranks: How many it believes to have.
        fusing: Whether it has fastcoll's collective for gradients.

    Raises:
        ValueError: There is a default group already.
    """
    if dist.is_initialized():
        raise ValueError(
            "fastcoll.bench.immediate_group: expected no default group, and there is one"
        )
    kind = FusingGroup if fusing else ImmediateGroup
    if not hasattr(dist.Backend, kind.NAME.upper()):
        dist.Backend.register_backend(
            kind.NAME,
            lambda store, rank, size, timeout: kind(rank, size),  # type: ignore[call-arg]
            devices=["cpu"],
        )
    dist.init_process_group(
        kind.NAME, store=_distributed_c10d.HashStore(), rank=0, world_size=ranks
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
