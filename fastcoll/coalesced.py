"""``fastcoll.all_reduce_coalesced``: one all-reduce of a list of tensors.

On CPU the list is one message, gathered from the tensors segment by segment. On devices many small tensors form one
bucket. If ranks map each other's memory, one kernel flattens the tensors and the next one reduces into them. Else the
bucket is flattened, reduced by NCCL and unflattened. The plan of a list is kept for the next call with this list. A
few large tensors are reduced one by one, unless they have a narrower wire, which copies them in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from fastcoll._group_backend import is_outside, serving_backend
from fastcoll._wires import require_wire, wire_of

__all__ = ["CoalescedWork", "all_reduce_coalesced"]


class CoalescedWork(dist.Work):
    """A work with a final step on its tensors, which runs once, however many threads wait.

    Args:
        work: The all-reduce.
        tensors: Tensors of the all-reduce.
        finish: The final step, called when the all-reduce has ended.
    """

    def __init__(self, work: dist.Work, tensors: list[Tensor], finish: Any) -> None:
        super().__init__()
        self._work = work

        def call(done: Future[Any]) -> list[Tensor]:
            done.value()
            finish()
            return tensors

        self._future: Future[list[Tensor]] = work.get_future().then(call)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the results; raises the error of the all-reduce."""
        self._work.wait(timeout) if timeout else self._work.wait()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the results are complete."""
        return bool(self._future.done())

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the list of tensors."""
        return self._future


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    wire_dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> dist.Work | None:
    """All-reduces a list of tensors in place, at the cost of one call.

    Args:
        tensors: One or more tensors of one device, of any dtypes and shapes. All ranks pass the same shapes and
            dtypes in the same order.
        op: The operation, as for ``dist.all_reduce``.
        group: None: the default group.
        async_op: Whether to return a work at once.
        wire_dtype: bfloat16 or float16: the dtype in which wider floating-point tensors travel. They are summed in
            float32 and rounded once. Other tensors travel in their own dtype. None: all tensors do.
        scale: Factor of the results, for floating-point and complex tensors. CUDA tensors are scaled before the
            rounding.

    Returns:
        A work if ``async_op`` is true, else None. None on a rank that is not in the group.

    Raises:
        TypeError: ``tensors`` is a tensor, or contains another object.
        ValueError: The list is empty or has tensors of several devices. The wire dtype is unknown. The scale is not
            finite, or is not 1.0 for an integer tensor. There is no group. Or another backend serves the tensors, and
            cannot use a wire dtype or a scale.
    """
    tensors = _checked(tensors, wire_dtype, scale)
    if is_outside(group):
        return None
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(
            "fastcoll.all_reduce_coalesced: expected a process group, got none. Call init_process_group before."
        )
    plain = wire_dtype is None and scale == 1.0
    device = tensors[0].device
    backend = serving_backend(group, device)
    work: dist.Work | None
    if backend is None:
        if not plain:
            raise ValueError(
                "fastcoll.all_reduce_coalesced: expected a group of the backend fastcoll for a wire dtype or a "
                f"factor, got {dist.get_backend(group)} for {device.type}. Make the group with it, or leave them out."
            )
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        options.asyncOp = async_op
        work = group.allreduce_coalesced(tensors, options)
    elif plain:
        work = backend.all_reduce_list(tensors, op, async_op)
    elif device.type != "cpu":
        work = backend.all_reduce_list(tensors, op, async_op, wire_dtype=wire_dtype, scale=scale)
    else:
        work = _on_cpu(tensors, op, backend, wire_dtype, scale)
    if async_op or work is None:
        return work
    work.wait()
    return None


def _on_cpu(
    tensors: list[Tensor], op: Any, backend: Any, wire: torch.dtype | None, scale: float
) -> CoalescedWork:
    """Casts float32 tensors on their way, others before and after; the factor comes last."""
    if wire is not None and all(tensor.dtype == torch.float32 for tensor in tensors):
        sent = tensors
        work = backend.all_reduce_fused(tensors, op, wire, async_op=True)
    else:
        with torch.no_grad():
            sent = [tensor.to(wire_of(tensor.dtype, wire) or tensor.dtype) for tensor in tensors]
        work = backend.all_reduce_list(sent, op, async_op=True)

    @torch.no_grad()
    def finish() -> None:
        for tensor, result in zip(tensors, sent, strict=True):
            if result is not tensor:
                tensor.copy_(result)
        if scale != 1.0:
            torch._foreach_mul_(tensors, scale)

    return CoalescedWork(work, tensors, finish)


def _checked(tensors: Any, wire_dtype: torch.dtype | None, scale: float) -> list[Tensor]:
    """Returns the tensors as a list.

    Raises:
        TypeError, ValueError: As ``all_reduce_coalesced``.
    """
    where = "fastcoll.all_reduce_coalesced"
    if isinstance(tensors, Tensor):
        raise TypeError(f"{where}: expected a list of tensors, got a tensor. Use dist.all_reduce.")
    found = list(tensors)
    if not found:
        raise ValueError(f"{where}: expected at least one tensor, got an empty list")
    for index, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: expected tensors, got {type(tensor).__name__} at {index}")
        if tensor.device != found[0].device:
            raise ValueError(
                f"{where}: expected tensors of one device, got {found[0].device} at 0 and {tensor.device} at {index}. "
                "Make a call for each."
            )
        if scale != 1.0 and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"{where}: expected floating-point tensors for a factor, got {tensor.dtype} at {index}. Pass scale=1.0"
            )
    require_wire(where, wire_dtype)
    if not math.isfinite(scale):
        raise ValueError(f"{where}: expected a finite scale, got {scale}")
    return found
