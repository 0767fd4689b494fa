"""A communication hook for DistributedDataParallel that does more with less traffic.

    state = FusedAllreduceState(wire_dtype=torch.bfloat16, gradient_norm=True)
    ddp.register_comm_hook(state, fused_allreduce_hook)
    loss.backward()
    state.clip_grad_norm_(ddp.parameters(), 1.0)

Without a wire dtype the average is part of the all-reduce, so that DDP has no division to do. With one the
gradients travel in fewer bits and are summed in float32 on their way, in rank order and with one rounding
of the sum: the error does not grow with the number of ranks, as it does where each hop of a ring rounds.
Norm and finiteness are taken from each rank's share of the reduced bucket, and the shares' numbers are
exchanged once a step: 1/n of the gradients is read once, where ``clip_grad_norm_`` reads all of them.
"""

# No `from __future__ import annotations`: DDP looks at the hook's.
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future

__all__ = ["WIRE_DTYPES", "FusedAllreduceState", "fused_allreduce_hook"]

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What gradients may travel as."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_BYTES = 4


class FusedAllreduceState:
    """What the hook does, and what it has found of the gradients of the last backward pass.

    Args:
        process_group: DDP's; None is the default group.
        wire_dtype: One of :data:`WIRE_DTYPES`: what gradients of a wider floating-point dtype travel as. fp8 with
            a scale for each rank and bucket, so that the largest gradient is the largest number. None: their own.
        average: Divide the sum by the number of ranks, as DDP does.
        gradient_norm: Whether :meth:`grad_norm` and ``found_inf`` will be asked for.

    Raises:
        ValueError: The wire dtype is none of these.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        average: bool = True,
        gradient_norm: bool = False,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            known = ", ".join(map(str, WIRE_DTYPES))
            raise ValueError(
                f"fastcoll.FusedAllreduceState: expected a wire_dtype of {known} or None, got {wire_dtype}"
            )
        self.process_group = process_group
        self.wire_dtype = wire_dtype
        self.average = average
        self.gradient_norm = gradient_norm
        self._squares: list[Tensor] = []
        self._total: Tensor | None = None
        self._pending: _Float8Bucket | None = None

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of all gradients that the last backward pass has reduced.

        The same bits on all ranks. All ranks call it, or ask for ``found_inf``, after the same backward passes; the
        first to be asked for communicates.

        Returns:
            A float64 tensor without dimensions, on the gradients' device; not finite if a gradient is not.

        Raises:
            RuntimeError: It was not asked for, or no backward pass has reduced gradients yet.
        """
        return self._sum_of_squares().sqrt()

    @property
    def found_inf(self) -> Tensor:
        """1.0 if a gradient is infinite or NaN, else 0.0: float32 of one element, as optimizers take it.

        Raises:
            RuntimeError: As :meth:`grad_norm`.
        """
        return (~self._sum_of_squares().isfinite()).float().reshape(1)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most ``max_norm``, without a pass to find the norm.

        Args:
            parameters: Of the model; all whose gradients were reduced.
            max_norm: As in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before.

        Raises:
            RuntimeError: As :meth:`grad_norm`.
        """
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _sum_of_squares(self) -> Tensor:
        if not self.gradient_norm or not (self._squares or self._total is not None):
            raise RuntimeError(
                "fastcoll.FusedAllreduceState: no norm is known. Make the state with gradient_norm=True, and call "
                "backward() on the DDP model before, outside of no_sync()."
            )
        if self._total is None:
            total = torch.stack([_used_here(square) for square in self._squares]).sum()
            dist.all_reduce(total, group=self.process_group)
            self._total, self._squares = total, []
        return self._total

    def _begin(self, bucket: GradBucket) -> None:
        """The first bucket of a backward pass: what is known is of the one before."""
        if bucket.index() == 0:
            self._squares, self._total, self._pending = [], None, None

    def _finish_float8(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.add_and_gather()

    def _measure(self, reduced: Tensor) -> None:
        """Adds this rank's share of a bucket."""
        if self.gradient_norm:
            share = _shares(reduced, self.process_group)[dist.get_rank(self.process_group)]
            # In float64 no square of a float32 overflows, so that the norm is finite where the gradients are.
            norm = torch.linalg.vector_norm(share, dtype=torch.float64)
            self._squares.append(norm.square())


def fused_allreduce_hook(state: FusedAllreduceState, bucket: GradBucket) -> Future[Tensor]:
    """Reduces a bucket as the state says, in place: for ``DistributedDataParallel.register_comm_hook``."""
    state._begin(bucket)
    buffer = bucket.buffer()
    wire = state.wire_dtype
    if wire is None or wire.itemsize >= buffer.itemsize or not buffer.is_floating_point():
        reduce = _reduced(buffer, state)
    elif wire in _FLOAT8:
        reduce = _reduced_in_float8(bucket, wire, state)
    else:
        reduce = _reduced_as(buffer, wire, state)

    def finish(done: Future[Tensor]) -> Tensor:
        result = done.value()
        state._measure(result)
        return result

    return reduce.then(finish) if state.gradient_norm else reduce


def _op(state: FusedAllreduceState) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if state.average else dist.ReduceOp.SUM


def _then(work: dist.Work, what: Callable[[], Tensor]) -> Future[Tensor]:
    """Calls ``what`` when the work has ended, and rethrows its error."""

    def call(done: Future[list[Tensor]]) -> Tensor:
        done.value()
        return what()

    future: Future[list[Tensor]] = work.get_future()
    return future.then(call)


def _reduced(buffer: Tensor, state: FusedAllreduceState) -> Future[Tensor]:
    work = dist.all_reduce(buffer, _op(state), group=state.process_group, async_op=True)
    return _then(work, lambda: buffer)


def _reduced_as(buffer: Tensor, wire: torch.dtype, state: FusedAllreduceState) -> Future[Tensor]:
    """Fastcoll sums 16-bit types in float32, and divides before it rounds."""
    if not buffer.is_cpu:
        from fastcoll.cuda.gradients import reducer_for

        if (start := reducer_for(buffer, state)) is not None:
            return _then(start(), lambda: buffer)
    sent = buffer.to(wire)
    work = dist.all_reduce(sent, _op(state), group=state.process_group, async_op=True)
    return _then(work, lambda: buffer.copy_(_used_here(sent)))


def _used_here(tensor: Tensor) -> Tensor:
    """Returns a tensor that another stream has made, and whose memory is that stream's, for use on this one."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


def _shares(buffer: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Cuts into a part for each rank, all equally long but for the last."""
    ranks = dist.get_world_size(group)
    each = -(-buffer.numel() // ranks)
    return [buffer[rank * each : (rank + 1) * each] for rank in range(ranks)]


class _Float8Bucket:
    """A bucket whose shares are on their way to the ranks that sum them.

    A message is a share in fp8, filled up to the common length, with its scale behind it.
    """

    def __init__(self, buffer: Tensor, wire: torch.dtype, state: FusedAllreduceState) -> None:
        self._buffer, self._wire, self._state = buffer, wire, state
        self._length = -(-buffer.numel() // dist.get_world_size(state.process_group))
        self._shares = _shares(buffer, state.process_group)
        self.future: Future[Tensor] = Future(devices=None if buffer.is_cpu else [buffer.device])
        scale = _scale_of(buffer, wire)
        self._sent = torch.stack([_packed(s, scale, wire, self._length) for s in self._shares])
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(
            self._received, self._sent, group=state.process_group, async_op=True
        )

    def add_and_gather(self) -> None:
        """Sums this rank's share, and begins to gather all of them."""
        group, ranks = self._state.process_group, len(self._shares)
        self._work.wait()
        total = torch.zeros(self._length, dtype=torch.float32, device=self._buffer.device)
        for message in self._received:
            total += _unpacked(message, self._wire)
        if self._state.average:
            total /= ranks
        own = _packed(total, _scale_of(total, self._wire), self._wire, self._length)
        sums = [torch.empty_like(own) for _ in range(ranks)]

        def finish(done: Future[list[Tensor]]) -> None:
            try:
                done.value()
                for share, message in zip(self._shares, sums, strict=True):
                    share.copy_(_unpacked(_used_here(message), self._wire)[: share.numel()])
                self.future.set_result(self._buffer)
            except Exception as error:
                self.future.set_exception(error)  # type: ignore[arg-type]

        gathering = dist.all_gather(sums, own, group=group, async_op=True)
        gathering.get_future().add_done_callback(finish)


def _reduced_in_float8(
    bucket: GradBucket, wire: torch.dtype, state: FusedAllreduceState
) -> Future[Tensor]:
    """The two steps of a bucket are called from here alone, never by a callback.

    So all ranks call them in one order: the second one of a bucket before the first one of the next.
    """
    state._finish_float8()
    state._pending = _Float8Bucket(bucket.buffer(), wire, state)
    future = state._pending.future
    if bucket.is_last():
        state._finish_float8()
    return future


def _scale_of(values: Tensor, wire: torch.dtype) -> Tensor:
    """Returns what the values are divided by before they travel: float32 of one element."""
    largest = (
        values.detach().abs().amax().float().reshape(1) if values.numel() else values.new_zeros(1)
    )
    scale = largest.float() / torch.finfo(wire).max
    return torch.where(scale > 0, scale, torch.ones_like(scale))  # NaN stays


def _packed(share: Tensor, scale: Tensor, wire: torch.dtype, length: int) -> Tensor:
    message = torch.zeros(length + _SCALE_BYTES, dtype=torch.uint8, device=share.device)
    message[: share.numel()] = (share.float() / scale).to(wire).view(torch.uint8)
    message[length:] = scale.view(torch.uint8)
    return message


def _unpacked(message: Tensor, wire: torch.dtype) -> Tensor:
    scale = message[-_SCALE_BYTES:].clone().view(torch.float32)
    return message[:-_SCALE_BYTES].view(wire).float() * scale
