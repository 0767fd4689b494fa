"""The all-reduce of one bucket of gradients, in place, with a wire dtype and the squares of the result.

What measures the squares, equally on all ranks:

- CPU tensors of float32, or without a wire dtype: the loop that reduces this rank's share.
- CUDA tensors that pass through a flat bucket: the kernel that writes them, unflatten or bucket_kernel. These are all
  tensors with a wire dtype over NCCL, lists with a wire dtype in mapped memory, and lists of many small tensors on
  several ranks. Each rank has all their sums, so the ranks exchange nothing.
- Other CUDA tensors: a pass over this rank's share, because NCCL or another rank writes the rest of the result. These
  are flat buckets of DDP without a wire dtype or in mapped memory, and few or large tensors. On one rank without a wire
  dtype no kernel writes a gradient, so this pass reads them all.
- Another backend, and other types of CPU tensors: a pass over this rank's share.

If any share was measured, the ranks exchange their sums once a step (see squares.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from fastcoll._group_backend import cpu_backend, serving_backend
from fastcoll._wires import require_wire, wire_of
from fastcoll.buckets import used_here
from fastcoll.ddp.squares import Squares, all_reduces_of, kernels_of

__all__ = ["BucketReduction", "Settings", "reduce_bucket"]

_ALONE_BYTES = 128 << 10
"""From this size on, a message of its own costs less than a copy."""


@dataclass(frozen=True)
class Settings:
    """Settings for the reduction of every bucket.

    Attributes:
        process_group: None: the default group.
        wire_dtype: The dtype in which gradients of a wider floating-point dtype travel, or None.
        average: Whether the sum is divided by the number of ranks.
        alone: Whether tensors of 128 KiB and more are messages of their own, because peers can reduce them in place.
            Equal on all ranks.

    Raises:
        ValueError: The wire dtype is not in ``WIRE_DTYPES``.
    """

    process_group: ProcessGroup | None
    wire_dtype: torch.dtype | None
    average: bool
    alone: bool = False

    def __post_init__(self) -> None:
        require_wire("fastcoll.ddp", self.wire_dtype)

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        """The reduction."""
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM

    def wire_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which gradients of a dtype travel; None: their own."""
        return wire_of(dtype, self.wire_dtype)


@dataclass
class BucketReduction:
    """A reduction in progress.

    Attributes:
        works: The works that have not ended. If ``then`` is called, there is one at most, and it needs a future.
        finish: Called when the works have ended. It may run on a thread of gloo, so it must hold no group. If gloo's
            thread drops the last reference to a group, the group waits for that thread, and the process aborts.
        squares: Of the tensors that were given to `Squares`, those that this reduction sets; set once finished.
    """

    works: Sequence[Any] = ()
    finish: Callable[[], None] = lambda: None
    squares: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Waits and finishes; on a device only the caller's stream waits.

        Raises:
            dist.DistBackendError: The group failed.
        """
        for work in self.works:
            work.wait()
        self.finish()

    def followed_by(self, step: Callable[[], None]) -> BucketReduction:
        """Returns the same reduction with a step after its last one."""

        def finish() -> None:
            self.finish()
            step()

        return replace(self, finish=finish)

    def then(self, value: Tensor) -> Future[Tensor]:
        """Returns a future of `value`, or of the work's error."""

        def call(done: Future[list[Tensor]]) -> Tensor:
            done.value()
            self.finish()
            return value

        if not self.works:
            ended: Future[Tensor] = Future(devices=None if value.is_cpu else [value.device])
            self.finish()
            ended.set_result(value)
            return ended
        (work,) = self.works
        future: Future[list[Tensor]] = work.get_future()
        return future.then(call)


def reduce_bucket(
    tensors: Sequence[Tensor],
    settings: Settings,
    squares: Squares | None = None,
    async_op: bool = True,
) -> BucketReduction:
    """Begins to reduce tensors of one dtype and device in place.

    On the CPU the tensors are one message, rounded and measured on its way. On a device fastcoll chooses the number of
    messages. For another backend they are copied to one message, and back.

    Args:
        tensors: At least one.
        settings: Settings of the reduction.
        squares: Gets the sums of squares of the result; None: they are not measured.
        async_op: False: the calling thread reduces if it can, and wakes no other thread.
    """
    first = tensors[0]
    wire = settings.wire_of(first.dtype)
    group = settings.process_group or dist.group.WORLD
    backend = cpu_backend(group, first.device)
    if backend is not None and (wire is None or first.dtype == torch.float32):
        messages = _messages(tensors, wire, settings)
        shares = [] if squares is None else [squares.new_share(first) for _ in messages]
        works = [
            backend.all_reduce_fused(message, settings.op, wire, share, async_op)
            for message, share in zip_longest(messages, shares)
        ]
        return BucketReduction([one for one in works if one is not None], squares=shares)
    ours = serving_backend(group, first.device)
    if group is not None and ours is not None and (wire is None or _casts(first, group)):
        return _listed(tensors, wire, settings, squares, ours)
    if len(tensors) == 1 and first.is_contiguous():
        return _composed(first, wire, settings, squares)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    begun = _composed(flat, wire, settings, squares)
    return begun.followed_by(lambda: _copy_back(flat, tensors))


def _messages(
    tensors: Sequence[Tensor], wire: torch.dtype | None, settings: Settings
) -> list[list[Tensor]]:
    """Cuts a bucket into messages, equally on all ranks: each large tensor if ``settings.alone``, and the rest."""
    if not settings.alone or wire is not None:
        return [list(tensors)]
    messages = [[tensor] for tensor in tensors if tensor.nbytes >= _ALONE_BYTES]
    rest = [tensor for tensor in tensors if tensor.nbytes < _ALONE_BYTES]
    return [*messages, rest] if rest else messages


def _composed(
    tensor: Tensor, wire: torch.dtype | None, settings: Settings, squares: Squares | None
) -> BucketReduction:
    """Reduces by a collective that any backend has. fastcoll sums 16-bit types in float32, and rounds after dividing.

    If a backend has no average, or divides after the sum, each rank divides before, as DDP does. So a 16-bit mean does
    not overflow on its way.
    """
    group = settings.process_group
    share = None if squares is None else squares.new_share(tensor)
    place = dist.get_rank(group), dist.get_world_size(group)
    op, sent = settings.op, tensor
    torchs = (group or dist.distributed_c10d._get_default_group())._get_backend(tensor.device)
    if settings.average and torchs.name() in ("gloo", "mpi"):
        op = dist.ReduceOp.SUM
        factor = 1.0 / dist.get_world_size(group)
        with torch.no_grad():
            sent = tensor.mul_(factor) if wire is None else tensor * factor
    sent = sent if wire is None else sent.to(wire)
    work = dist.all_reduce(sent, op, group, async_op=True)

    def finish() -> None:
        if sent is not tensor:
            tensor.copy_(used_here(sent))
        if share is not None:
            _measure([tensor], share, *place)

    return BucketReduction([work], finish, [] if share is None else [share])


def _listed(
    tensors: Sequence[Tensor],
    wire: torch.dtype | None,
    settings: Settings,
    squares: Squares | None,
    backend: Any,
) -> BucketReduction:
    """Reduces by fastcoll's all-reduce of lists, which casts and measures on its way."""
    group = settings.process_group
    if squares is None:
        work = backend.all_reduce_list(tensors, settings.op, True, wire_dtype=wire)
        return BucketReduction([work])
    sizes, first = tuple(tensor.numel() for tensor in tensors), tensors[0]
    count, left = 0, [index for index, size in enumerate(sizes) if size]
    if (kernels := kernels_of(group, first.device)) is not None:
        op = "AVG" if settings.average else "SUM"
        count, left = kernels.measured(sizes, first.dtype, op, wire)
    sums = squares.new_sums(count, first.device) if count else None
    share = squares.new_share(first) if left or not count else None
    place = dist.get_rank(group), dist.get_world_size(group)
    work = backend.all_reduce_list(tensors, settings.op, True, wire_dtype=wire, squares=sums)

    def finish() -> None:
        if share is not None:
            _measure([tensors[index] for index in left], share, *place)

    written = [one for one in (sums, share) if one is not None]
    return BucketReduction([work], finish, written)


def _measure(tensors: Sequence[Tensor], square: Tensor, rank: int, ranks: int) -> None:
    """Sets the sum of squares of a rank's share of tensors."""
    share = _share_of_list(tensors, rank, ranks)
    # In float64 no square of a float32 overflows, so the norm is finite if the gradients are.
    if share:
        real = [torch.view_as_real(part) if part.is_complex() else part for part in share]
        norms = torch._foreach_norm(real, dtype=torch.float64)
        used_here(square).copy_(torch.stack(norms).square().sum())


@torch.no_grad()
def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a flat bucket to its tensors, by one launch on a device."""
    parts = used_here(flat).split_with_sizes([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
    )


def _share_of_list(tensors: Sequence[Tensor], rank: int, ranks: int) -> list[Tensor]:
    """Returns the parts of tensors that make up a rank's share of all their elements."""
    total = sum(tensor.numel() for tensor in tensors)
    each = -(-total // ranks)
    begin, end, at, parts = rank * each, (rank + 1) * each, 0, []
    for tensor in tensors:
        first, last = max(begin - at, 0), min(end - at, tensor.numel())
        if first < last:
            parts.append(tensor.reshape(-1)[first:last])
        at += tensor.numel()
    return parts


def _casts(tensor: Tensor, group: ProcessGroup) -> bool:
    """Returns whether all-reduces of tensors like `tensor` cast to a 16-bit wire and back themselves.

    With peer-mapped memory one kernel does it; over NCCL it is copy-in, all-to-all, one sum in float32, all-gather and
    copy-out. Either way the sum is rounded once. The result is equal on all ranks. It is False for other dtypes than
    float32, if Triton is missing on a rank, and before the group's first call on a device.

    `tensor` is a gradient or a bucket of gradients, and `group` one of fastcoll on its device.
    """
    if tensor.is_cpu or tensor.dtype != torch.float32:
        return False
    reduces = all_reduces_of(group, tensor.device)
    return reduces is not None and reduces.has_kernels()
