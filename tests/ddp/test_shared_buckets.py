"""DDP's buckets of CPU tensors lie in shared memory by default; the user's settings win, and bits are the same."""

import os

import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from world import Worlds, init_group

import fastcoll

pytestmark = [pytest.mark.filterwarnings("ignore"), beyond_gloo("has no shared memory")]


def gradients(group, width=600):
    """The gradients of two steps of one model, which are parts of DDP's buckets."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    for step in range(2):  # DDP makes its buckets anew after the first
        ddp.zero_grad(set_to_none=False)
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(4, width, generator=generator)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def are_shared(group, tensors):
    return [backend_of(group).is_shared(tensor) for tensor in tensors]


@on_ranks(2)
def test_by_default_and_not_where_the_option_says_so():
    groups = [dist.new_group(), dist.new_group(pg_options=fastcoll.Options(shared_buckets=False))]
    found = [gradients(group) for group in groups]
    assert are_shared(groups[0], found[0]) == [True] * 4
    assert are_shared(groups[1], found[1]) == [False] * 4
    for ours, private in zip(*found, strict=True):
        assert torch.equal(ours, private)
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "environ",
    [
        {"FASTCOLL_SHARED_BUCKETS": "0"},
        {"DDP_DISABLE_COMM_MEM": "1"},
        {"FASTCOLL_SHARED_MEMORY": "off"},
    ],
    ids=lambda environ: next(iter(environ)),
)
@on_ranks(2, init=False)
def test_not_where_a_variable_says_so_or_nothing_is_shared(environ):
    os.environ.update(environ)
    init_group()
    assert are_shared(None, gradients(None)) == [False] * 4


def beyond_the_arena():
    found = gradients(None, width=5000)  # 100 MB
    assert are_shared(None, found) == [False] * 4
    dist.all_reduce(found[-1])


@pytest.mark.full
def test_where_shared_memory_is_lacking_buckets_are_private(launcher, tmp_path):
    """Ranks of their own: a process reserves its memory once."""
    worlds = Worlds(tmp_path, environ={"FASTCOLL_ARENA_BYTES": str(64 << 20)})
    try:
        worlds(2).run(beyond_the_arena)
        assert "a tensor is not in shared memory" in worlds(2).log(0)
    finally:
        worlds.close()
