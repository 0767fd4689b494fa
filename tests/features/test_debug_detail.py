"""Collectives under TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps the backend."""

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, reduce_scatter_single
from oracle import assert_reduced, assert_same, sample
from world import init_group


class Detail:
    """A default group made at level DETAIL."""

    def __enter__(self):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        init_group()

    def __exit__(self, *_):
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)


def collectives():
    with Detail():
        mine, size = dist.get_rank(), dist.get_world_size()
        inputs = [sample(r, (6,), torch.float) for r in range(size)]
        tensor = inputs[mine].clone()
        dist.all_reduce(tensor)
        assert_reduced(tensor, inputs, "SUM")
        work = dist.broadcast(tensor, 1, async_op=True)
        work.wait()
        assert_reduced(tensor, inputs, "SUM")
        gathered = [torch.empty(6) for _ in range(size)]
        dist.all_gather(gathered, inputs[mine])
        assert_same(torch.stack(gathered), torch.stack(inputs))
        part = torch.empty(2)
        reduce_scatter_single(part, inputs[mine])
        assert_reduced(part, [t[2 * mine : 2 * mine + 2] for t in inputs], "SUM")
        dist.all_to_all_single(tensor, inputs[mine])
        assert_same(tensor, torch.cat([t[2 * mine : 2 * mine + 2] for t in inputs]))
        sending = dist.isend(inputs[mine], (mine + 1) % size)
        dist.recv(tensor, (mine - 1) % size)
        sending.wait()
        assert_same(tensor, inputs[(mine - 1) % size])
        group = dist.new_group([0, 2])
        if mine in (0, 2):
            dist.barrier(group=group)
        dist.barrier()


def messages_between_some():
    """Messages of two ranks must not put the third out of step."""
    with Detail():
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)
        assert_same(tensor, torch.full((4,), 3.0))


def mismatch():
    """DETAIL says which ranks differ; the backend must let it."""
    with Detail():
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
        return str(caught.value)


def test_collectives(world):
    world(3).run(collectives, init=False)


@beyond_gloo("counts messages as collectives")
def test_messages_between_some_ranks(world):
    world(3).run(messages_between_some, init=False)


def test_mismatch_is_named(world):
    for text in world(2).run(mismatch, init=False):
        assert "mismatch" in text.lower(), text
