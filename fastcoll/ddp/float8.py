"""The all-reduce of a bucket whose gradients travel in 8 bits, because no backend reduces such dtypes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fastcoll.buckets import used_here
from fastcoll.ddp.reduction import Settings, measure, shares_of

__all__ = ["Float8Bucket", "Float8Turns"]

_SCALE_BYTES = 4


class Float8Bucket:
    """A bucket whose shares travel to the ranks that sum them.

    A message is a share in fp8, padded to the common length, followed by its scale.

    Attributes:
        future: Future of the buffer with the result.
        square: float64 [1], set to the sum of squares of this rank's share; None if the norm is not measured.
    """

    def __init__(self, buffer: Tensor, settings: Settings) -> None:
        group, wire = settings.process_group, settings.wire_of(buffer.dtype)
        assert wire is not None
        self._buffer, self._wire, self._settings = buffer, wire, settings
        self._length = -(-buffer.numel() // dist.get_world_size(group))
        self._shares = shares_of(buffer, group)
        self.square = buffer.new_zeros(1, dtype=torch.float64) if settings.gradient_norm else None
        self.future: Future[Tensor] = Future(devices=None if buffer.is_cpu else [buffer.device])
        scale = _scale_of(buffer, wire)
        self._sent = torch.stack([_packed(s, scale, wire, self._length) for s in self._shares])
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)

    def wait(self) -> None:
        """Waits for the result; call ``add_and_gather`` before."""
        self.future.wait()

    def add_and_gather(self) -> None:
        """Sums this rank's share, and begins to gather all shares."""
        group, ranks = self._settings.process_group, len(self._shares)
        self._work.wait()
        total = torch.zeros(self._length, dtype=torch.float32, device=self._buffer.device)
        for message in used_here(self._received):  # the first step may have had another stream
            total += _unpacked(message, self._wire)
        if self._settings.average:
            total /= ranks
        own = _packed(total, _scale_of(total, self._wire), self._wire, self._length)
        sums = [torch.empty_like(own) for _ in range(ranks)]

        # The callback's objects are freed on the backend's thread, so it holds no group, as in BucketReduction.
        future, buffer, shares = self.future, self._buffer, self._shares
        wire, square, rank = self._wire, self.square, dist.get_rank(group)

        def finish(done: Future[list[Tensor]]) -> None:
            try:
                done.value()
                for share, message in zip(shares, sums, strict=True):
                    share.copy_(_unpacked(used_here(message), wire)[: share.numel()])
                if square is not None:
                    measure(shares[rank], used_here(square))
                future.set_result(buffer)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        gathering = dist.all_gather(sums, own, group=group, async_op=True)
        gathering.get_future().add_done_callback(finish)


class Float8Turns:
    """The two steps of each bucket, in the same order on all ranks.

    Callbacks call no collectives, because their order may differ between ranks. The second step of a bucket is called
    just before the next bucket of any kind begins. The last bucket's second step follows all first steps. Until then
    the bucket's first step overlaps the backward pass.
    """

    def __init__(self) -> None:
        self._pending: Float8Bucket | None = None

    def begin(self, buffer: Tensor, settings: Settings) -> Float8Bucket:
        """Begins the first step of a bucket; call ``finish`` before."""
        assert self._pending is None
        self._pending = Float8Bucket(buffer, settings)
        return self._pending

    def finish(self) -> None:
        """Calls the second step of the pending bucket, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.add_and_gather()

    def forget(self) -> None:
        """Drops the pending bucket of a backward pass that raised."""
        self._pending = None


def _scale_of(values: Tensor, wire: torch.dtype) -> Tensor:
    """Returns the divisor of the values before they travel: float32 [1]."""
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
