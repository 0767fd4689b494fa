"""The norm of gradients of device tensors: by the kernels that write them, by shares, and by both in one step."""

import contextlib
import math
import os
from collections import Counter

import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import full

from fastcoll._group_backend import all_gather_flat
from fastcoll.cuda import selector
from fastcoll.ddp import GradientSynchronizer, squares

SMALL = (5, 0, 300, 2049, 1, 33, 4097)
MIXED = (5, 0, 300, 2049, 1, 33, 6000)
"""Elements of gradients: in buckets of 0.02 MiB the last one is alone, and the others are a list of many."""


class Weights(torch.nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self, sizes, dtype):
        super().__init__()
        made = (torch.nn.Parameter(torch.ones(size, dtype=dtype, device=DEVICE)) for size in sizes)
        self.weights = torch.nn.ParameterList(made)

    def forward(self, inputs):
        parts = zip(self.weights, inputs, strict=True)
        return torch.stack([(weight * given).sum() for weight, given in parts]).sum()


class Optimizer:
    """What ``clip_in_step`` uses of an optimizer of torch with ``fused=True``."""

    _step_supports_amp_scaling = True

    def register_step_post_hook(self, hook):
        return self


def inputs_of(sizes, dtype, step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    random = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
    return [one.mul_(10.0**step).to(dtype).to(DEVICE) for one in made]


def stepped(model, inputs):
    """Makes a backward pass on these inputs."""
    model.zero_grad(set_to_none=True)
    model(inputs).backward()


def expected_norm(model):
    """Returns the norm that PyTorch finds in the reduced gradients, in float64."""
    gradients = [parameter.grad.cpu().double() for parameter in model.parameters()]
    return torch.linalg.vector_norm(torch.cat(gradients))


def assert_on_all_ranks(*values):
    """Fails unless all ranks have the same bits."""
    own = torch.stack([value.detach().cpu().double().reshape(()) for value in values])
    every = own.new_empty(dist.get_world_size(), len(own))
    all_gather_flat(every.view(-1), own)
    assert torch.equal(*torch.broadcast_tensors(every.view(torch.int64), own.view(torch.int64)))


@contextlib.contextmanager
def exchanges():
    """Notes the exchanges of the shares' sums."""
    noted, gather = [], squares.all_gather_flat
    squares.all_gather_flat = lambda *given, **named: noted.append(given) or gather(*given, **named)
    try:
        yield noted
    finally:
        squares.all_gather_flat = gather


KERNELS, SHARES, BOTH = "kernels", "shares", "both"
CASES = [
    # ranks, algorithm, wire, dtype of gradients, their sizes, what measures them
    (1, "auto", None, torch.float32, SMALL, SHARES),
    (1, "auto", torch.bfloat16, torch.float32, SMALL, KERNELS),
    (2, "nccl", None, torch.float32, SMALL, KERNELS),
    (2, "nccl", None, torch.bfloat16, SMALL, KERNELS),
    full(2, "nccl", None, torch.float64, SMALL, KERNELS),
    (3, "nccl", torch.bfloat16, torch.float32, MIXED, KERNELS),
    (2, "nccl", None, torch.float32, SMALL[:1], SHARES),
    (4, "nccl", None, torch.float32, MIXED, BOTH),
    (2, "auto", None, torch.float16, SMALL, KERNELS),
    (4, "two_shot", torch.bfloat16, torch.float32, SMALL, KERNELS),
    full(3, "two_shot", torch.float16, torch.float32, SMALL, KERNELS),
    (2, "two_shot", None, torch.float32, SMALL[:1], SHARES),
    full(3, "ring", None, torch.float32, SMALL, KERNELS),
    (2, "auto", torch.bfloat16, torch.float32, MIXED, BOTH),
]


@pytest.mark.parametrize(("size", "algorithm", "wire", "dtype", "sizes", "measures"), CASES)
@on_ranks(world="peer_world", fresh=True)
def test_the_norm_is_that_of_the_reduced_gradients(size, algorithm, wire, dtype, sizes, measures):
    """With the same bits on all ranks, and no exchange if kernels measure all."""
    os.environ["FASTCOLL_ALGO"] = algorithm
    model = Weights(sizes, dtype)
    options = {"bucket_cap_mb": 0.02 if sizes == MIXED else 1, "average": False}
    synchronizer = GradientSynchronizer(model, wire_dtype=wire, gradient_norm=True, **options)
    stepped(
        model, inputs_of(sizes, dtype, 0)
    )  # the ranks agree on kernels, and on the order of gradients
    with recording_device.no_violations(), exchanges() as exchanged:
        for step in range(1, 3):
            stepped(model, inputs_of(sizes, dtype, step))
            norm = synchronizer.grad_norm()
            expected = expected_norm(model)
            torch.testing.assert_close(norm.cpu(), expected, rtol=1e-13, atol=0)
            optimizer = Optimizer()
            same = synchronizer.clip_in_step(optimizer, 0.5)
            torch.testing.assert_close(same, norm, rtol=0, atol=0)
            wanted = ((norm.cpu() + 1e-6) / 0.5).clamp(min=1.0).float()
            torch.testing.assert_close(optimizer.grad_scale.cpu(), wanted)
            assert optimizer.found_inf.item() == synchronizer.found_inf.item() == 0.0
            assert_on_all_ranks(norm, same, optimizer.grad_scale)
    assert len(exchanged) == (2 if measures != KERNELS and size > 1 else 0)
    assert bool(synchronizer._squares._used) == (measures != SHARES)
    assert bool(synchronizer._squares._shares) == (measures != KERNELS)


@pytest.mark.parametrize("algorithm", ["nccl", "two_shot"])
@on_ranks(2, world="peer_world", fresh=True)
def test_a_list_of_several_buckets_keeps_the_sums_of_each(algorithm):
    os.environ["FASTCOLL_ALGO"] = algorithm
    whole, selector._BUCKET_BYTES = selector._BUCKET_BYTES, 8192
    try:
        model = Weights(SMALL, torch.float32)
        synchronizer = GradientSynchronizer(model, wire_dtype=torch.float16, gradient_norm=True)
        stepped(model, inputs_of(SMALL, torch.float32, 0))
        (plan,) = peer_memory.reduces_of().plans.values()
        assert (
            len(plan.parts) == 3
        )  # over mapped memory, the first is a tensor alone, measured by shares
        norm = synchronizer.grad_norm()
        torch.testing.assert_close(norm.cpu(), expected_norm(model), rtol=1e-13, atol=0)
        assert_on_all_ranks(norm)
    finally:
        selector._BUCKET_BYTES = whole


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("size", "algorithm", "wire", "sizes"),
    [
        (1, "auto", torch.bfloat16, SMALL),
        (2, "nccl", None, SMALL),
        (2, "two_shot", torch.float16, SMALL),
        (2, "nccl", None, MIXED),
    ],
)
@on_ranks(world="peer_world", fresh=True)
def test_what_is_not_finite_on_one_rank_is_found_on_all(size, algorithm, wire, sizes, value):
    os.environ["FASTCOLL_ALGO"] = algorithm
    model = Weights(sizes, torch.float32)
    options = {"bucket_cap_mb": 0.02, "gradient_norm": True}
    synchronizer = GradientSynchronizer(model, wire_dtype=wire, **options)
    for bad in (None, sizes.index(33), len(sizes) - 1):
        inputs = inputs_of(sizes, torch.float32, 0)
        if bad is not None and dist.get_rank() == size - 1:
            inputs[bad][-1] = value
        stepped(model, inputs)
        optimizer = Optimizer()
        norm = synchronizer.clip_in_step(optimizer, 1.0)
        found = 0.0 if bad is None else 1.0
        assert optimizer.found_inf.item() == synchronizer.found_inf.item() == found
        assert math.isfinite(norm) == (bad is None)


def counted(model, synchronizer, max_norm):
    """Makes a step, and returns its launches by name, and the bytes that they read and write."""
    inputs = inputs_of([parameter.numel() for parameter in model.parameters()], torch.float32, 0)
    torch.recording.synchronize(DEVICE)
    recording_device.clear()
    stepped(model, inputs)
    if max_norm is not None:
        synchronizer.clip_in_step(Optimizer(), max_norm)
    launched = recording_device.log("launch")
    # Flags of 8 bytes are left out: how many a kernel touches depends on which ranks it waits for.
    touches = [touch.bytes for entry in launched for touch in entry.touches if touch.bytes != 8]
    return Counter(entry.what for entry in launched), sum(touches)


COUNTED = [
    # ranks, algorithm, wire, and the sums of squares: of blocks of 2048 elements, or of 8192 in mapped memory
    (1, "nccl", torch.bfloat16, 9),
    (4, "nccl", None, 9),
    (4, "nccl", torch.bfloat16, 9),
    (4, "two_shot", torch.bfloat16, 6),
]


@pytest.mark.parametrize(("size", "algorithm", "wire", "sums"), COUNTED)
@on_ranks(world="peer_world", fresh=True)
def test_norm_and_clipping_cost_one_launch(size, algorithm, wire, sums):
    """Beside it, a sum of squares is written and read; a mapped one is also left for the peers, or fetched."""
    os.environ["FASTCOLL_ALGO"] = algorithm
    steps = []
    for max_norm in (None, 1.0):
        model = Weights(SMALL, torch.float32)
        measures = max_norm is not None
        synchronizer = GradientSynchronizer(model, wire_dtype=wire, gradient_norm=measures)
        # The first steps compile kernels and make tables.
        steps.append([counted(model, synchronizer, max_norm) for _ in range(3)][-1])
    (launched, touched), (with_norm, touched_then) = steps
    assert (with_norm - launched, launched - with_norm) == ({"norm_kernel": 1}, {})
    least = 2 * 8 * sums + 16
    mapped = 8 * sums if algorithm == "two_shot" else 0
    assert least <= touched_then - touched <= least + mapped
