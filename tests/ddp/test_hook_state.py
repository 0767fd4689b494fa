"""What a FusedAllreduceState remembers from bucket to bucket, and whom it serves."""

import gc

import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from training import loss_of, network
from ways import hooked

from fastcoll.ddp import FusedAllreduceState


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
