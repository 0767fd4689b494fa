"""When gradients are reduced: beside the backward pass or at its end; the results are the same."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, beyond_gloo
from on_ranks import on_ranks
from torch import nn
from training import loss_of, network, train
from ways import WAYS, hooked

import fastcoll
from fastcoll.ddp.overlap import are_shared, can_overlap, leave_a_core
from fastcoll.ddp.reduction import reduce_bucket

STEPS = 4
SMALL = {"bucket_cap_mb": 0.001}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "free"),
    [
        ([("a", 1, {0, 1})], True),
        ([("a", 1, {0, 1}), ("a", 1, {0, 1})], False),
        ([("a", 2, {0, 1, 2, 3}), ("a", 1, {0, 1, 2, 3})], True),
        ([("a", 2, {0, 1}), ("a", 2, {2, 3})], False),
        (
            [("a", 2, {0, 1, 2}), ("a", 2, {3, 4})],
            True,
        ),  # ranks that are bound to cores of their own
        ([("a", 8, {0})], False),
        ([("a", 1, {0, 1}), ("b", 1, {0, 1})], True),  # equal numbers, but cores of two hosts
        ([("a", 2, {0, 1}), ("b", 1, {2, 3, 4})], False),
    ],
    ids=str,
)
def test_a_core_is_left_where_threads_are_fewer(ranks, free):
    assert leave_a_core(ranks) is free


@pytest.mark.parametrize(
    ("size", "cores", "answer"), [(1, 2, True), (1, 1, False), (2, 2, False)], ids=str
)
@on_ranks()
def test_all_ranks_get_one_answer(cores, answer):
    """Each has one thread, as all ranks here."""
    with mock.patch("os.sched_getaffinity", lambda _: set(range(cores))):
        assert can_overlap(None, CPU) is (answer or IS_GLOO)


@beyond_gloo("fastcoll's own shared memory")
@on_ranks(2)
def test_all_ranks_know_whether_buffers_are_shared():
    """Of all ranks, of the first alone, of none; and a buffer of which only a part is dense."""
    shared, other = fastcoll.empty_shared(64), torch.empty(64)
    first = shared if dist.get_rank() == 0 else other
    found = [are_shared(None, one) for one in (shared, first, other, shared[:8], shared[::2])]
    assert found == [True, False, False, True, False]


class Mixed(nn.Module):
    """Two dtypes, so that the buckets of a pass are not of one; and a branch that not all ranks take."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 20)
        self.wide = nn.Linear(20, 20).double()
        self.unused = nn.Linear(20, 20)
        self.last = nn.Linear(20, 5)

    def forward(self, inputs):
        hidden = self.wide(self.first(inputs).double()).float()
        if dist.get_rank() == 0:
            hidden = self.unused(hidden)
        return self.last(hidden)


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_the_results_do_not_depend_on_it(how, wire):
    for make in (network, lambda: network(torch.float), Mixed):
        options = {"wire_dtype": wire, "gradient_norm": True, "find_unused_parameters": True}
        modules = [WAYS[how](make(), overlap=o, **options, **SMALL) for o in (True, False, None)]
        losses, norms = [], []
        for module, statistics in modules:
            losses.append(train(module, STEPS))
            norms.append(statistics.grad_norm().item())
        assert losses[0] == losses[1] == losses[2]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        assert norms[0] == pytest.approx(norms[2], rel=1e-12)
        for others in zip(*(module.parameters() for module, _ in modules), strict=True):
            assert all(torch.equal(others[0].grad, other.grad) for other in others)


def reductions_of_a_pass(how, overlap, shared=True):
    """Return the reductions that a pass began: how many tensors each had, and how many layers were yet to come."""
    begun, behind = [], []

    def reduce(tensors, *rest):
        begun.append((len(tensors), 3 - len(behind)))
        return reduce_bucket(tensors, *rest)

    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    if how == "synchronizer":
        group = None
    else:
        options = None if IS_GLOO else fastcoll.Options(shared_buckets=shared)
        group = dist.new_group(pg_options=options)
    called, _ = WAYS[how](model, group, overlap=overlap, **SMALL)
    module = "synchronizer" if how == "synchronizer" else "hook"
    for _ in range(2):  # DDP cuts other buckets after the first pass
        begun.clear(), behind.clear()
        hooks = [layer.register_full_backward_hook(lambda *_: behind.append(1)) for layer in model]
        with mock.patch(f"fastcoll.ddp.{module}.reduce_bucket", reduce):
            called(torch.ones(2, 20, requires_grad=True)).sum().backward()
        for hook in hooks:
            hook.remove()
    return begun


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_it_says_when(how):
    begun = reductions_of_a_pass(how, True)
    assert len(begun) > 1
    assert any(left > 0 for _, left in begun)
    begun = reductions_of_a_pass(how, False, False)
    assert all(left <= (how == "hook") for _, left in begun), begun
    if how == "hook":  # the last bucket is ready before the pass is over
        assert len(begun) == 1
        assert begun[0][0] > 1


@beyond_gloo("has no shared memory")
@on_ranks(2)
def test_buckets_in_shared_memory_are_messages_of_their_own():
    begun = reductions_of_a_pass("hook", False)
    assert len(begun) > 1
    assert all(tensors == 1 and left <= 1 for tensors, left in begun), begun


@on_ranks(2)
def test_an_error_reaches_every_bucket():
    """The other rank ends the group instead of reducing: nobody waits for what was kept."""
    group = dist.new_group([0, 1], backend="fastcoll")
    ddp, _ = hooked(network(), group, overlap=False, **SMALL)
    if dist.get_rank() == 1:
        dist.barrier()
        group.abort()
    else:
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            loss_of(ddp, 0, 0).backward()
    dist.barrier()
