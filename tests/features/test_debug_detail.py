"""Collectives under TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps the backend."""

import gc

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import MOVING, REDUCING, Case, run_all
from on_ranks import on_ranks
from oracle import assert_same
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, network, train, train_alone
from world import init_group


class Detail:
    """A default group made at level DETAIL."""

    def __enter__(self):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        init_group()

    def __exit__(self, *_):
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks(3, init=False)
def test_collectives():
    with Detail():
        for later in (False, True):
            run_all(Case(name, root=1, async_op=later) for name in [*REDUCING, *MOVING])
        group = dist.new_group([0, 2])
        if dist.get_rank() in (0, 2):
            dist.barrier(group=group)
        dist.barrier()


@beyond_gloo("torch 2.13 crashes in DDP's logger, which takes the wrapper for gloo")
@on_ranks(2, init=False)
def test_training():
    with Detail():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
        train(model, 4)
        assert_like(model.module, train_alone(4, dist.get_world_size()))
        del model
        gc.collect()  # before its group


@beyond_gloo("counts messages as collectives")
@on_ranks(3, init=False)
def test_messages_between_some_ranks():
    """Messages of two ranks must not put the third out of step."""
    with Detail():
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)
        assert_same(tensor, torch.full((4,), 3.0))


@on_ranks(2, init=False)
def test_mismatch_is_named():
    """DETAIL says which ranks differ; the backend must let it."""
    with Detail(), pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
