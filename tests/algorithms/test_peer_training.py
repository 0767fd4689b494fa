"""Training over peer memory: the bits that CPU ranks come to, whatever changes between steps."""

import os

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import full
from training import loss_of, network
from ways import hooked

import fastcoll
from fastcoll.ddp import FusedAllreduceState
from fastcoll.ddp.reduction import reduce_bucket

WIDTH = 30  # several buckets


def trained(device, wire, options):
    """Trains with DDP and the hook; in between a part is frozen, which makes DDP anew, and thawed."""
    model = network(torch.float, WIDTH).to(device)
    states = []
    for frozen, steps in (((), 3), ((0, 2), 2), ((), 3)):
        for index, layer in enumerate(model):
            layer.requires_grad_(index not in frozen)
        own = {"wire_dtype": wire, "gradient_norm": True}
        ddp, state = hooked(model, bucket_cap_mb=0.002, **own, **options)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
            states.append(float(state.grad_norm()))
        del ddp
    return [p.detach().cpu() for p in model.parameters()], states


@pytest.mark.parametrize(
    ("size", "wire", "algorithm", "options"),
    [
        (3, None, "auto", {}),
        (2, torch.bfloat16, "auto", {}),
        full(2, torch.bfloat16, "two_shot", {"gradient_as_bucket_view": True}),
        (2, torch.bfloat16, "nccl", {"gradient_as_bucket_view": True}),
        full(2, torch.float16, "nccl", {}),
        full(2, torch.float16, "two_shot", {}),
    ],
)
@on_ranks(world="peer_world", fresh=True)
def test_the_hook_comes_to_the_bits_of_the_cpu(size, wire, algorithm, options):
    """Over NCCL too: its sums have one rounding."""
    if algorithm != "auto":
        os.environ["FASTCOLL_ALGO"] = algorithm
    expected, norms = trained("cpu", wire, options)
    with recording_device.no_violations():
        found, same = trained(DEVICE, wire, options)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(same, norms)
    assert wire is None or peer_memory.reduces_of().plans.built


@on_ranks(2, world="peer_world", fresh=True)
def test_a_bucket_takes_at_most_two_launches():
    """One for a flat bucket: average and casts are in it."""
    x = torch.randn(700, device=DEVICE)
    dist.all_reduce(x)
    reduces = peer_memory.reduces_of()
    state = FusedAllreduceState(wire_dtype=torch.bfloat16)
    built = reduces.plans.built
    reduce_bucket([x], state.settings).wait()
    assert reduces.plans.built == built + 1
    plan = reduces.plans.values()[-1]
    assert plan.launches == 1
    fastcoll.all_reduce_coalesced([torch.randn(70, device=DEVICE) for _ in range(9)])
    plan = reduces.plans.values()[-1]
    assert plan.launches == 2


def steps_by_list(device):
    """Gradients are reduced as a list; layers are frozen and thawed, gradients kept in place and set to None."""
    model = network(torch.float, WIDTH).to(device)
    seen = []
    phases = (((), 3, False), ((0,), 3, False), ((), 2, False), ((2,), 2, True), ((), 3, True))
    step = 0
    for frozen, steps, to_none in phases:
        for index, layer in enumerate(model):
            layer.requires_grad_(index not in frozen)
            if index in frozen:
                layer.zero_grad(set_to_none=True)
        for _ in range(steps):
            step += 1
            model.zero_grad(set_to_none=to_none)
            loss_of(model, dist.get_rank(), step).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            fastcoll.all_reduce_coalesced(gradients, dist.ReduceOp.AVG)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            seen.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    return seen


@on_ranks(2, world="peer_world", fresh=True)
def test_plans_give_no_wrong_result_when_gradients_change():
    os.environ["FASTCOLL_ALGO"] = "two_shot"
    expected = steps_by_list("cpu")
    dist.all_reduce(torch.ones(3, device=DEVICE))
    with recording_device.no_violations():
        found = steps_by_list(DEVICE)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), step
    assert peer_memory.reduces_of().plans.built >= 4
