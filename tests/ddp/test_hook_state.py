"""What a FusedAllreduceState remembers from bucket to bucket, and whom it serves."""

import gc

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from training import loss_of, network
from ways import hooked

from fastcoll.ddp import FusedAllreduceState, fused_allreduce_hook

STEPS = 6


class Bucket:
    """As DDP's: one of several, with a buffer."""

    def __init__(self, index, last, buffer):
        self._index, self._last, self._buffer = index, last, buffer

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def buffer(self):
        return self._buffer

    def parameters(self):
        return [self]


@on_ranks(2)
def test_a_last_bucket_without_a_wire_behind_one_of_float8():
    """A last bucket that has no narrower wire."""
    rank = dist.get_rank()
    buffers = [torch.full((7,), 1.0 + rank), torch.full((3,), 2.0 + rank, dtype=torch.complex64)]
    state = FusedAllreduceState(wire_dtype=torch.float8_e4m3fn)
    for _ in range(2):
        futures = [
            fused_allreduce_hook(state, Bucket(index, index == 1, buffer.clone()))
            for index, buffer in enumerate(buffers)
        ]
        small, wide = torch.futures.wait_all(futures)
        torch.testing.assert_close(small, torch.full((7,), 1.5), rtol=0.1, atol=0.0)
        assert torch.equal(wide, torch.full((3,), 2.5, dtype=torch.complex64))


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2, fresh=True)
def test_a_state_serves_one_module(together):
    state = FusedAllreduceState(gradient_norm=True)
    one, other = (hooked(network(), state=state, bucket_cap_mb=0.001)[0] for _ in range(2))
    for step in range(0 if together else 2):
        loss_of(one, dist.get_rank(), step).backward()
    loss = loss_of(other, dist.get_rank(), 0)
    if together:
        loss = loss + loss_of(one, dist.get_rank(), 0)
    with pytest.raises(
        RuntimeError, match="expected the buckets of one DDP module, got one of another"
    ):
        loss.backward()


@on_ranks(2)
def test_a_state_goes_on_with_another_wrapper():
    """The same module wrapped again, and another one when the first is gone."""
    state = FusedAllreduceState(gradient_norm=True)
    model = network()
    for step in range(2):
        ddp, _ = hooked(model, state=state, bucket_cap_mb=0.001)
        for _ in range(2):
            loss_of(ddp, dist.get_rank(), step).backward()
        assert state.grad_norm() > 0
    del model, ddp
    gc.collect()
    for _ in range(2):
        ddp, _ = hooked(network(), state=state, bucket_cap_mb=0.001)
        for step in range(3):
            loss_of(ddp, dist.get_rank(), step).backward()
        del ddp
        gc.collect()
