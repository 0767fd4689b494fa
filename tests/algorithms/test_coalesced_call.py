"""fastcoll.all_reduce_coalesced on CPU and device tensors."""

import datetime
import math
import os
import weakref

import device_calls
import kernel_oracle
import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from device_calls import inputs_of
from on_ranks import on_ranks
from test_peer_engine import assert_reduced_lists, lists_of
from torch.distributed.distributed_c10d import _coalescing_manager

import fastcoll
from bench.gradients import gpt2_medium
from bench.kernel_cases import bucketed
from fastcoll.cuda.all_reduce import CallOptions

pytestmark = on_ranks(2, world="peer_world", fresh=True)

SIZES = (5, 0, 300, 4097, 1, 33)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("device", ["cpu", peer_memory.DEVICE])
@pytest.mark.parametrize(("size", "wire"), [(2, None), (2, torch.float16), (3, torch.bfloat16)])
@on_ranks(world="peer_world")
def test_the_same_bits_on_cpu_and_device(size, device, wire, async_op):
    """The factor is a power of two, so that it does not matter where it comes in."""
    lists = lists_of(torch.float32, 3, SIZES)
    tensors = [tensor.to(device, copy=True) for tensor in lists[dist.get_rank()]]
    work = fastcoll.all_reduce_coalesced(
        tensors, dist.ReduceOp.AVG, wire_dtype=wire, scale=0.5, async_op=async_op
    )
    if async_op:
        assert work.wait() is True
        assert all(a is b for a, b in zip(work.get_future().wait(), tensors, strict=True))
    else:
        assert work is None
    assert_reduced_lists(tensors, lists, "avg", 0.5, wire)


def test_a_plan_serves_all_tensors_of_its_kind():
    """One plan serves all tensors of a kind; those that begin elsewhere than at 16 bytes are of another.

    A list that comes again is not prepared again, wherever it lies.
    """
    whole = torch.zeros(40 * 60, device=peer_memory.DEVICE)
    dist.all_reduce(whole[:60])
    reduces = peer_memory.reduces_of()
    for shift, count, kinds in ((0, 9, 1), (1, 5, 2)):
        for at in range(shift, count * 60, 60):
            x = whole[at : at + 60].fill_(at + dist.get_rank())
            dist.all_reduce(x)
            assert x.cpu().eq(2 * at + 1).all()
        assert reduces.plans.built == kinds
    for lists in (0, 0, 1, 2):
        parts = whole[60 * lists :].split(60)[:9]
        fastcoll.all_reduce_coalesced([part.fill_(lists) for part in parts])
        assert all(part.cpu().eq(2 * lists).all() for part in parts)
    assert reduces.plans.built == 3 and reduces.plans.placed == 3


def test_a_communicators_plan_finds_its_kernels_once():
    """Until plans are forgotten, as with a new timeout, or another stream is current."""
    comm, other = fastcoll.communicator(), torch.Stream(device=peer_memory.DEVICE)
    x = torch.ones(40, device=peer_memory.DEVICE)
    plan = comm.all_reduce_plan(x)
    plan()
    reduces = peer_memory.reduces_of()
    for built in (1, 2):
        plan()
        plan()
        assert reduces.plans.built == built
        reduces.plans.forget()
    backend = dist.group.WORLD._get_backend(x.device)
    backend._set_default_timeout(datetime.timedelta(seconds=50))
    plan()
    assert reduces.plans.built == 3
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        plan()
        plan()
    torch.accelerator.current_stream().wait_stream(other)
    assert reduces.plans.built == 4 and x.tolist() == [2.0**8] * 40


def test_a_plan_keeps_no_workspace_of_its_own():
    """A workspace that was replaced by a larger one is freed, with the plans that held it."""
    os.environ["FASTCOLL_ALGO"] = "nccl"
    group = dist.new_group()
    known = []
    for count in (20, 40, 30, 400, 20):
        tensors = [torch.ones(count, device=peer_memory.DEVICE) for _ in range(6)]
        fastcoll.all_reduce_coalesced(tensors, group=group)
        assert all(tensor.cpu().eq(2).all() for tensor in tensors)
        reduces = peer_memory.reduces_of(group)
        (memory,) = reduces._workspaces.values()
        known.append(weakref.ref(memory))
        del memory
    small, large, same, largest, last = [ref() for ref in known]
    assert small is large is same is None
    assert largest is last is not None and len(reduces.plans.values()) == 2


def test_lists_that_overlap_are_refused():
    """Lists whose tensors overlap are refused, also when such a list was reduced before; the group lives on."""
    whole = torch.ones(2000, device=peer_memory.DEVICE)
    fastcoll.all_reduce_coalesced(list(whole[:900].split(100)))
    overlap = [whole[at : at + 100] for at in range(0, 810, 90)]
    with pytest.raises(ValueError, match="apart"):
        fastcoll.all_reduce_coalesced(overlap)
    fastcoll.all_reduce_coalesced(list(whole[900:1800].split(100)))
    assert whole.cpu().eq(torch.tensor([2.0] * 1800 + [1.0] * 200)).all()


def test_few_tensors_are_not_copied():
    """Few tensors go each for itself, with no copy."""
    inputs = [inputs_of(3000, torch.float32, seed) for seed in range(3)]
    tensors = [each[dist.get_rank()].to(peer_memory.DEVICE) for each in inputs]
    fastcoll.all_reduce_coalesced(tensors)
    (plan,) = peer_memory.reduces_of().plans.values()
    assert plan.launches == 3
    for tensor, given in zip(tensors, inputs, strict=True):
        assert torch.equal(tensor.cpu(), kernel_oracle.all_reduce(given))


@on_ranks(1, world="peer_world", fresh=True)
def test_a_wire_fuses_few_tensors_too():
    """Each is copied to the wire and back anyway."""
    tensors = [torch.ones(1000, device=peer_memory.DEVICE) for _ in range(3)]
    fastcoll.all_reduce_coalesced(tensors, wire_dtype=torch.bfloat16)  # compiles, and makes tables
    recording_device.clear()
    fastcoll.all_reduce_coalesced(tensors, wire_dtype=torch.bfloat16)
    launched = [entry.what for entry in recording_device.log("launch")]
    assert launched == ["flatten_kernel", "unflatten_kernel"]
    assert all(tensor.cpu().eq(1).all() for tensor in tensors)


@on_ranks(1, world="peer_world")
def test_each_bucket_of_gradients_is_one_list():
    """GPT-2 medium, whose mean gradient has 5 MB; and all its gradients at once, which are cut."""
    dist.all_reduce(torch.ones(3, device=peer_memory.DEVICE))
    reduces = peer_memory.reduces_of()
    assert reduces.has_kernels()

    def launches(shapes):
        tasks = [
            ("all_reduce", torch.float32, "AVG", -1, 1.0, 0, 0, math.prod(shape))
            for shape in shapes
        ]
        calls = list(reduces._algorithms(tasks, CallOptions(torch.bfloat16)))
        assert sorted(index for _, _, of in calls for index in of) == list(range(len(shapes)))
        return 2 * len(calls)  # into a bucket, and out of it

    assert sum(launches(bucket) for bucket in bucketed(gpt2_medium())) == 74
    assert launches(gpt2_medium()[::-1]) == 74


def test_lists_that_go_to_nccl_are_decided_once():
    """What NCCL does as it is, tensor by tensor, is decided once for lists too, wherever they lie."""
    os.environ["FASTCOLL_ALGO"] = "nccl"
    group = dist.new_group()
    dist.all_reduce(torch.ones(3, device=peer_memory.DEVICE), group=group)
    reduces = peer_memory.reduces_of(group)
    built, decided, decide = reduces.plans.built, [], reduces._chosen
    reduces._chosen = lambda tasks, options: decided.append(len(tasks)) or decide(tasks, options)
    me = dist.get_rank()
    for _ in range(3):
        tensors = [torch.full((k,), me + 1.0, device=peer_memory.DEVICE) for k in (9, 0, 7)]
        fastcoll.all_reduce_coalesced(tensors, group=group)
        assert all(tensor.cpu().eq(3).all() for tensor in tensors)
    assert decided == [2] and reduces.chosen == "nccl" and reduces.plans.built == built
    fastcoll.all_reduce_coalesced(tensors[::-1], group=group)  # other sizes in their places
    # Before the call too: for the code.
    device_calls.all_reduce(tensors, group=group, algorithm="nccl", fuse=True)
    assert decided == [2, 2, 2, 2] and reduces.plans.built == built + 1
    assert all(tensor.cpu().eq(12).all() for tensor in tensors)


@on_ranks(2, world="peer_world")
def test_lists_of_all_kinds():
    """Several dtypes, integers among them, and tensors with gaps."""
    me, device = dist.get_rank(), peer_memory.DEVICE
    with recording_device.no_violations():
        whole = torch.arange(200.0).view(20, 10).to(device) + me
        tensors = [
            torch.full((9,), me + 1, dtype=torch.int64, device=device),
            whole[:, ::2],
            *[torch.full((k,), 1.5 + me, dtype=torch.bfloat16, device=device) for k in range(1, 7)],
            torch.full((8,), 2.0 + me, device=device),
        ]
        fastcoll.all_reduce_coalesced(tensors, async_op=True).wait()
        assert tensors[0].tolist() == [3] * 9
        expected = 2 * torch.arange(200.0).view(20, 10)[:, ::2] + 1
        assert torch.equal(tensors[1].cpu(), expected)
        assert all(tensor.cpu().eq(4.0).all() for tensor in tensors[2:-1])
        assert tensors[-1].cpu().eq(5.0).all()


@on_ranks(2, world="peer_world")
def test_what_cannot_be_is_refused_before_anything_travels():
    x, half, doubles = torch.ones(3), torch.bfloat16, torch.ones(3, dtype=torch.float64)
    there = peer_memory.DEVICE
    for error, why, tensors, options in (
        (ValueError, "tensor", [], {}),
        (TypeError, "list of tensors", x, {}),
        (TypeError, "float at 1", [x, 1.0], {}),
        (ValueError, "one device", [x, x.to(there)], {}),
        (ValueError, "wire_dtype", [x], {"wire_dtype": torch.int8}),
        (ValueError, "factor", [x.long()], {"scale": 2.0}),
        (ValueError, "scale", [x], {"scale": math.inf}),
        (ValueError, "the kernels add .*, not float64", [doubles.to(there)], {"wire_dtype": half}),
    ):
        with pytest.raises(error, match=why):
            fastcoll.all_reduce_coalesced(tensors, **options)
    own = dist.new_group(backend="gloo")
    x = [torch.ones(3), torch.ones(4)]
    fastcoll.all_reduce_coalesced(x, group=own)
    assert all(tensor.eq(2).all() for tensor in x)
    with pytest.raises(ValueError, match="backend fastcoll"):
        fastcoll.all_reduce_coalesced(x, group=own, scale=2.0)
    part = dist.new_group([0])
    if dist.get_rank() == 1:
        assert fastcoll.all_reduce_coalesced(x, group=part) is None


def test_a_batch_that_nccl_refuses_launches_no_kernel():
    """One call of a batch is a kernel's, and NCCL has no type for the other."""
    device = torch.device(peer_memory.DEVICE)
    served, refused = (
        torch.ones(30, device=device),
        torch.ones(30, dtype=torch.int16, device=device),
    )
    dist.all_reduce(served)
    recording_device.clear()
    with pytest.raises(TypeError, match="int16"), _coalescing_manager(device=device):
        dist.all_reduce(served)
        dist.all_reduce(refused)
    assert not recording_device.log("launch")
    dist.all_reduce(served)
    assert served.cpu().eq(4).all()


def test_a_plan_serves_all_sizes_of_a_class():
    """The number of elements is an argument, as long as the algorithm stays."""
    x = torch.empty(40_000, device=peer_memory.DEVICE)
    dist.all_reduce(x[:1].fill_(1))
    plans = peer_memory.reduces_of().plans
    assert plans.built == 1
    for count in (2, 15, 16, 17, 59, 1000, 16_384):
        dist.all_reduce(x[:count].fill_(1))
        assert x[:count].cpu().eq(2).all()
    assert plans.built == 1
    dist.all_reduce(x.fill_(1))  # two_shot
    assert x.cpu().eq(2).all() and plans.built == 2


@pytest.mark.full
def test_the_plan_that_was_not_used_longest_goes_first():
    x = torch.ones(3, device=peer_memory.DEVICE)
    for scale in range(1, 300):
        device_calls.all_reduce(x.fill_(1), scale=float(scale))
        assert x.cpu().eq(2 * scale).all()
    plans = peer_memory.reduces_of().plans
    assert plans.built == 299 and len(plans.values()) == 256
    device_calls.all_reduce(x, scale=299.0)
    device_calls.all_reduce(x, scale=44.0)  # the oldest that is kept
    assert plans.built == 299
    device_calls.all_reduce(x, scale=1.0)
    assert plans.built == 300
    device_calls.all_reduce(x, scale=44.0)
    assert plans.built == 300, (
        "the plan that was made first has gone, not the one that was used first"
    )
