"""``logical_ranks``: one result on any number of ranks. The oracle is one process that folds all shards' gradients."""

import contextlib

import pytest
import recording_device
import torch
import torch.distributed as dist
from logical_training import assert_same, by_fsdp, by_hook, by_synchronizer, reference, train
from on_ranks import on_ranks
from oracle import folded
from peer_memory import DEVICE
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, network

import fastcoll
import fastcoll.fsdp
from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

pytestmark = on_ranks(2)

FULL = pytest.mark.full


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize(
    ("size", "count"),
    [
        *[(1, 8), (2, 8), (3, 8), (6, 8)],
        *[pytest.param(*one, marks=FULL) for one in ((4, 8), (8, 8), (4, 7), (2, 5))],
    ],
)
@on_ranks()
def test_the_result_is_that_of_one_process(size, count, make):
    model, shards, _ = make(network(torch.float), None, count)
    assert_same(train(model, shards), reference(count)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=FULL) for size in (1, 4, 6, 8))])
@on_ranks(world="peer_world", fresh=True)
def test_device_tensors_have_the_same_bits(size, make):
    group = dist.new_group(pg_options=fastcoll.Options(order="fixed"))
    # FSDP2 frees gradients while the optimizer reads them: its next stream waits, which the model sees too late.
    ordered = contextlib.nullcontext if make is by_fsdp else recording_device.no_violations
    with ordered():
        model, shards, _ = make(network(torch.float).to(DEVICE), group, 8)
        assert_same(train(model, shards), reference(8)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.double])
@on_ranks(3)
def test_gradients_are_summed_in_float32_or_wider_and_rounded_once(make, dtype):
    model, shards, _ = make(network(dtype), None, 6)
    assert_same(train(model, shards), reference(6, dtype)[0])


@pytest.mark.parametrize("make", [by_hook, by_synchronizer])
@pytest.mark.parametrize(("size", "count"), [(2, 8), (3, 4)])
@on_ranks()
def test_the_norm_is_that_of_the_average(size, count, make):
    model, shards, statistics = make(network(torch.float), None, count, gradient_norm=True)
    train(model, shards)
    torch.testing.assert_close(statistics.grad_norm(), reference(count)[1], rtol=1e-5, atol=0)


def test_sums_need_no_division():
    model, shards, _ = by_synchronizer(network(torch.float), None, 6, average=False)
    assert_same(train(model, shards), reference(6, average=False)[0])


def test_what_cannot_be_one_sum_is_refused():
    model = network(torch.float)
    for options, text in [
        (
            {"logical_ranks": 1},
            "as many logical_ranks as the group has ranks, or more, got 1 for 2",
        ),
        ({"logical_ranks": 4, "wire_dtype": torch.bfloat16}, "no wire_dtype with logical_ranks"),
        ({"logical_ranks": 4, "find_unused_parameters": True}, "every parameter to get a gradient"),
    ]:
        with pytest.raises(ValueError, match=text):
            GradientSynchronizer(model, **options)
    with pytest.raises(ValueError, match="expected logical_ranks for shards"):
        GradientSynchronizer(network(torch.float)).shards()
    sharded = fully_shard(
        network(torch.float), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    )
    with pytest.raises(ValueError, match=r"reduce_dtype torch\.bfloat16"):
        fastcoll.fsdp.apply(sharded, logical_ranks=4)


@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
def test_a_batch_that_was_left_early_does_not_count(make):
    model, shards, _ = make(network(torch.float), None, 8)
    for stop in (1, 3):
        for number, shard in enumerate(shards):
            if number == stop:
                break
            loss_of(model, shard, 0).backward()
        model.zero_grad()
    assert_same(train(model, shards), reference(8)[0])


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("make", [by_hook, by_synchronizer, by_fsdp])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_a_pass_too_few_or_too_many_is_refused(size, make, counts):
    if size == 1 and make is by_fsdp and counts == (1, 2):
        return  # FSDP2 has no collective then, and accumulates
    model, shards, _ = make(network(torch.float), None, 2 * size)
    with pytest.raises(RuntimeError, match=r"one (synchronized )?backward pass for each shard"):
        for count, shard in zip(counts, shards, strict=True):
            for _ in range(count):
                loss_of(model, shard, 0).backward()


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_fsdp_without_synchronized_gradients_is_refused(size):
    model, shards, _ = by_fsdp(network(torch.float), None, 2 * size)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="one synchronized backward pass for each shard"):
        for shard in shards:
            loss_of(model, shard, 0).backward()


def test_parameters_that_fsdp_ignores_keep_their_gradients():
    model = network(torch.float)
    ignored = model[0].weight
    fully_shard(model, ignored_params={ignored})
    mine = []
    for shard in fastcoll.fsdp.apply(model, logical_ranks=4):
        mine.append(shard)
        loss_of(model, shard, 0).backward()
    alone = network(torch.float)
    own = [torch.autograd.grad(loss_of(alone, shard, 0), alone[0].weight)[0] for shard in mine]
    torch.testing.assert_close(ignored.grad, sum(own))


def test_passes_outside_of_shards_are_refused():
    model, shards, _ = by_synchronizer(network(torch.float), None, 4)
    with pytest.raises(RuntimeError, match=r"every backward pass inside `for shard in"):
        loss_of(model, 0, 0).backward()
    other, shards, _ = by_synchronizer(network(torch.float), None, 4)
    train(other, shards)
    with pytest.raises(RuntimeError, match="expected no gradients before the first shard"):
        next(iter(shards))


def test_modules_of_ddp_that_do_not_reduce_every_parameter():
    model = network(torch.float)
    state = FusedAllreduceState(logical_ranks=4)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters or static_graph"):
        state.shards(ddp)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, fused_allreduce_hook)
    mine = []
    for shard in state.shards(ddp):
        mine.append(shard)
        loss_of(ddp, shard, 0).backward()
    own = [torch.autograd.grad(loss_of(model, shard, 0), model[0].weight)[0] for shard in mine]
    torch.testing.assert_close(model[0].weight.grad, sum(own))  # as without shards


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_complex_gradients(size):
    model = nn.Linear(2, 3, bias=False, dtype=torch.complex64)
    nn.init.constant_(model.weight, 1 + 2j)

    def loss(shard):
        return (model.weight.conj() * model(torch.full((1, 2), shard + 1j)).sum()).abs().sum()

    synchronizer = GradientSynchronizer(model, logical_ranks=6)
    for shard in synchronizer.shards():
        loss(shard).backward()
    found = model.weight.grad.resolve_conj()
    synchronizer.remove()
    grads = [torch.autograd.grad(loss(shard), model.weight)[0].resolve_conj() for shard in range(6)]
    parts = torch.view_as_real(folded(grads, torch.add)) / 6
    assert torch.equal(found, torch.view_as_complex(parts))


@on_ranks(2, world="peer_world", fresh=True)
def test_a_group_of_any_order_is_refused_on_a_device():
    model = nn.Linear(3, 3).to(DEVICE)
    synchronizer = GradientSynchronizer(model, logical_ranks=4)
    shards = iter(synchronizer.shards())
    next(shards)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    next(shards)
    with pytest.raises(ValueError, match=r"order any on .* Use fastcoll with Options"):
        model(torch.ones(2, 3, device=DEVICE)).sum().backward()
