"""A process group whose collectives return at once and reduce nothing: to see what surrounds them, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _create_work_from_future
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["ImmediateGroup", "immediate_group"]

_NAME = "fastcoll_bench_immediate"


class ImmediateGroup(dist.ProcessGroup):
    """Rank 0 of as many ranks as asked for, which all do as it does; nothing is reduced."""

    def _done(self, result: Any) -> dist.Work:
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Leaves the tensors as they are."""
        return self._done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Leaves the tensors as they are."""
        return self._done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gives each output this rank's input, for DDP compares; no dispatch mode sees it."""
        with _disable_current_modes():
            for of_ranks, own in zip(outputs, inputs, strict=True):
                for output in of_ranks:
                    output.copy_(own)
        return self._done(outputs)

    def alltoall_base(
        self, output: Any, source: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Leaves the output as it is."""
        return self._done([output])

    def getBackendName(self) -> str:
        """Returns the name it is registered under."""
        return _NAME


@contextlib.contextmanager
def immediate_group(ranks: int) -> Iterator[None]:
    """Makes it the default group for a while.

    Raises:
        ValueError: There is a default group already.
    """
    if dist.is_initialized():
        raise ValueError(
            "fastcoll.bench.immediate_group: expected no default group, and there is one"
        )
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(
            _NAME,
            lambda store, rank, size, timeout: ImmediateGroup(rank, size),
            devices=["cpu"],
        )
    dist.init_process_group(_NAME, store=HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
