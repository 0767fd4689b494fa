"""Which collectives tell autograd that they changed a tensor: those of which gloo tells it, and no others.

An in-place collective on a tensor that autograd has saved (the output of a ReLU) is then an error in backward, or is
not, on every backend alike. NCCL tells of the outputs of all_gather alone, so CUDA tensors follow it; that is in
tests/device. FASTCOLL_DEBUG=TRACE tells of all.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from collective_cases import MOVING, REDUCING, Case, Runner
from fault_list import plays
from on_ranks import on_ranks
from world import Worlds


def changed(later: bool, group: dist.ProcessGroup | None = None) -> dict[str, list[bool]]:
    """By call, for each of its tensors: whether its version moved."""
    found = {}
    for name in [*REDUCING, *MOVING]:
        try:
            runner = Runner(Case(name, shape=(4,), async_op=later), group)
        except RuntimeError as error:  # torch 2.11's gloo has no all_to_all of lists
            assert str(error) == "Backend gloo does not support alltoall", error
            continue
        runner.check()
        after = runner.versions()
        found[name] = [now > old for now, old in zip(after, runner.before, strict=True)]
    tensors = [torch.ones(4), torch.ones(4)]
    work = dist.all_reduce_coalesced(tensors, group=group, async_op=later)
    if later:
        work.wait()
    return found | {"all_reduce_coalesced": [tensor._version > 0 for tensor in tensors]}


@plays(54)
@pytest.mark.parametrize("later", [False, True], ids=["synchronous", "asynchronous"])
@on_ranks(2)
def test_the_same_tensors_as_with_gloo(later):
    ours = changed(later)
    group = dist.new_group(backend="gloo")
    gloos = changed(later, group)
    assert len(ours) - len(gloos) <= 1
    assert {name: ours[name] for name in gloos} == gloos
    dist.destroy_process_group(group)


@on_ranks(2)
def test_what_autograd_saved_may_be_reduced_in_place():
    weight = torch.ones(4, requires_grad=True)
    hidden = (weight * 2).relu()
    dist.all_reduce(hidden.detach())
    hidden.sum().backward()


def seen_under_trace() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        test_what_autograd_saved_may_be_reduced_in_place()


@beyond_gloo("has no FASTCOLL_DEBUG")
def test_trace_tells_of_every_change(tmp_path):
    with contextlib.closing(Worlds(tmp_path, environ={"FASTCOLL_DEBUG": "TRACE"})) as worlds:
        worlds(2).run(seen_under_trace)
