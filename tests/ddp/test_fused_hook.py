"""fastcoll's own communication hook: the same training as without it, fewer bits on the wire, norm and finiteness."""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, loss_of, network, sgd, train, train_alone

from fastcoll.ddp import WIRE_DTYPES, FusedAllreduceState, fused_allreduce_hook

STEPS = 6


def hooked(state, model=None, **options):
    ddp = DistributedDataParallel(model or network(), **options)
    ddp.register_comm_hook(state, fused_allreduce_hook)
    return ddp


def same_curve_as_stock(options):
    """In float32, on a number of ranks that is a power of two, bit for bit."""
    stock = DistributedDataParallel(network(torch.float), **options)
    ours = hooked(FusedAllreduceState(), network(torch.float), **options)
    assert train(ours, STEPS) == train(stock, STEPS)
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_replicated(ours.module)


@pytest.mark.parametrize("options", [
    {}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True},
    {"find_unused_parameters": True},
], ids=str)  # fmt: skip
def test_without_a_wire_dtype_training_is_the_same(world, options):
    world(2).run(same_curve_as_stock, options)


def mean_of_all(size):
    ddp = hooked(FusedAllreduceState(), bucket_cap_mb=0.001)
    train(ddp, STEPS)
    assert_like(ddp.module, train_alone(STEPS, size), 1e-10)
    assert_replicated(ddp.module)


@pytest.mark.parametrize("size", [1, 3])
def test_any_number_of_ranks(world, size):
    world(size).run(mean_of_all, size)


def sums():
    summed = hooked(FusedAllreduceState(average=False))
    loss_of(summed, dist.get_rank(), 0).backward()
    stock = DistributedDataParallel(network())
    loss_of(stock, dist.get_rank(), 0).backward()
    for ours, theirs in zip(summed.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad * dist.get_world_size())


def test_the_sum_in_place_of_the_average(world):
    world(3).run(sums)


class Given(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self, length):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(length))

    def forward(self, inputs):
        return (self.weight * inputs).sum()


def gradients_of(wire, rows=3000):
    """The gradients that a hook makes of given ones, and the float64 mean of what all ranks have."""
    generator = torch.Generator().manual_seed(7)
    given = torch.randn(dist.get_world_size(), rows, generator=generator, dtype=torch.float32)
    model = Given(rows)
    ddp = hooked(FusedAllreduceState(wire_dtype=wire), model)
    ddp(given[dist.get_rank()]).backward()
    exact = given.to(wire).double().mean(0) if wire.itemsize == 2 else given.double().mean(0)
    found = model.weight.grad
    everywhere = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, found)
    assert all(torch.equal(other, found) for other in everywhere), "the ranks differ"
    return found, exact


def one_rounding(wire):
    """The error is that of one rounding of the sum, whatever the number of ranks."""
    found, exact = gradients_of(wire)
    # Beside it that of the float32 sum, of numbers up to 5.
    allowed = torch.finfo(wire).eps / 2 * exact.abs() + 5 * dist.get_world_size() * 2.0**-24
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_a_sum_of_16_bits_is_rounded_once(world, wire, size):
    world(size).run(one_rounding, wire)


def small_error_in_float8(wire):
    found, exact = gradients_of(wire)
    step = torch.finfo(wire).eps
    largest = 5.0  # of the normal numbers that are given
    error = (found.double() - exact).abs()
    # Each rank's gradients and the mean are rounded, relative to themselves or to the smallest number of the scale.
    assert (error <= 2 * step * largest).all()
    assert error.square().mean().sqrt() <= step * exact.square().mean().sqrt() * 1.5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wire", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_with_a_scale(world, wire, size):
    world(size).run(small_error_in_float8, wire)


def learns(wire):
    ddp = hooked(FusedAllreduceState(wire_dtype=wire), network(torch.float), bucket_cap_mb=0.001)
    losses = train(ddp, 60)
    assert_replicated(ddp.module)
    stock = DistributedDataParallel(network(torch.float))
    expected = train(stock, 60)
    tail = slice(-10, None)
    assert abs(sum(losses[tail]) - sum(expected[tail])) < 0.1 * (expected[0] - expected[-1]) * 10


@pytest.mark.parametrize("wire", WIRE_DTYPES, ids=str)
def test_training_with_any_wire_learns_as_without(world, wire):
    world(2).run(learns, wire)


def norms(options):
    state = FusedAllreduceState(gradient_norm=True)
    ddp = hooked(state, **options)
    optimizer = sgd(ddp.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
        expected = torch.nn.utils.get_total_norm(p.grad for p in ddp.parameters())
        torch.testing.assert_close(state.grad_norm(), expected.double())
        assert state.found_inf.tolist() == [0.0]
        before = [p.grad.clone() for p in ddp.parameters()]
        limit = expected.item() / 2
        assert torch.equal(state.clip_grad_norm_(ddp.parameters(), limit), state.grad_norm())
        clipped = [p.grad.clone() for p in ddp.parameters()]
        for p, grad in zip(ddp.parameters(), before, strict=True):
            p.grad.copy_(grad)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), limit)
        for p, grad in zip(ddp.parameters(), clipped, strict=True):
            torch.testing.assert_close(grad, p.grad)
        optimizer.step()
    return state.grad_norm().item()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}], ids=str)
def test_norm_of_the_gradients(world, size, options):
    assert len(set(world(size).run(norms, options))) == 1


def finds(value, wire):
    state = FusedAllreduceState(wire_dtype=wire, gradient_norm=True)
    ddp = hooked(state, network(torch.float))
    loss = loss_of(ddp, dist.get_rank(), 0, torch.float)
    (loss * (value if dist.get_rank() == 1 else 1.0)).backward()
    assert state.found_inf.tolist() == [1.0], state.grad_norm()
    ddp.zero_grad()
    loss_of(ddp, dist.get_rank(), 1, torch.float).backward()
    assert state.found_inf.tolist() == [0.0] and math.isfinite(state.grad_norm())


@pytest.mark.parametrize("wire", [None, *WIRE_DTYPES], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_gradients_that_are_not_finite_are_found_on_all_ranks(world, value, wire):
    world(2).run(finds, value, wire)


def accumulates():
    """no_sync: nothing is reduced, and the state says what it knew before."""
    state = FusedAllreduceState(gradient_norm=True)
    ddp = hooked(state)
    with pytest.raises(RuntimeError, match="no norm is known"):
        state.grad_norm()
    with ddp.no_sync():
        loss_of(ddp, dist.get_rank(), 0).backward()
    loss_of(ddp, dist.get_rank(), 1).backward()
    expected = torch.nn.utils.get_total_norm(p.grad for p in ddp.parameters())
    torch.testing.assert_close(state.grad_norm(), expected.double())


def test_gradients_are_accumulated_without_communication(world):
    world(2).run(accumulates)


def uneven():
    """DDP's join runs the hook for ranks that have no more inputs."""
    state = FusedAllreduceState(gradient_norm=True)
    ddp = hooked(state)
    optimizer = sgd(ddp.parameters())
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    assert_replicated(ddp.module)


def test_uneven_inputs(world):
    world(2).run(uneven)


class Two(nn.Module):
    """A part in double and a part in bfloat16."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = network(), network(torch.bfloat16)

    def forward(self, rank, step):
        narrow = loss_of(self.narrow, rank, step, torch.bfloat16)
        return loss_of(self.wide, rank, step) + narrow


def half_and_double():
    """A wire that is not narrower is left alone."""
    model = Two()
    state = FusedAllreduceState(wire_dtype=torch.bfloat16, gradient_norm=True)
    ddp = hooked(state, model)
    ddp(dist.get_rank(), 0).backward()
    expected = torch.nn.utils.get_total_norm(p.grad.double() for p in model.parameters())
    torch.testing.assert_close(state.grad_norm(), expected)
    sgd(model.parameters()).step()
    assert_replicated(model.wide)


def test_mixed_dtypes(world):
    world(2).run(half_and_double)


def test_another_wire_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected a wire_dtype of torch\.bfloat16.*got torch\.int8"
    ):
        FusedAllreduceState(wire_dtype=torch.int8)


def compiled():
    """torch.compile cuts a DDP model at its buckets; the hook gets what it gets without."""
    ours = hooked(
        FusedAllreduceState(gradient_norm=True), network(torch.float, width=700), bucket_cap_mb=1
    )
    stock = DistributedDataParallel(network(torch.float, width=700))
    fast = torch.compile(ours, backend="aot_eager")
    for step in range(3):
        for model in (fast, stock):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step, torch.float).backward()
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_compiled_model(world):
    world(2).run(compiled)


def reads_buckets_where_they_are():
    """DDP puts its buckets where the ranks share memory; the peers read them there."""
    state = FusedAllreduceState(gradient_norm=True)
    ours = hooked(state, network(torch.float, width=800), gradient_as_bucket_view=True)
    stock = DistributedDataParallel(network(torch.float, width=800))
    for step in range(3):
        for model in (ours, stock):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step, torch.float).backward()
        expected = torch.nn.utils.get_total_norm([p.grad.double() for p in stock.parameters()])
        torch.testing.assert_close(state.grad_norm(), expected)
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "memfd:fastcoll" in line]
    address = next(ours.parameters()).grad.data_ptr()
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans), spans


def test_buckets_in_shared_memory(world):
    world(2).run(reads_buckets_where_they_are)


def sparse_buckets():
    ours = hooked(FusedAllreduceState(), nn.Embedding(10, 3, sparse=True))
    stock = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    for model in (ours, stock):
        model(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()
    assert torch.equal(ours.module.weight.grad.to_dense(), stock.module.weight.grad.to_dense())


def test_sparse_gradients(world):
    world(2).run(sparse_buckets)


def complex_gradients(backend_name):
    group = dist.new_group(backend=backend_name)
    model = nn.Linear(3, 2, dtype=torch.complex64)
    state = FusedAllreduceState(group, gradient_norm=True, average=False)
    ddp = hooked(state, model, process_group=group)
    ddp(torch.ones(4, 3, dtype=torch.complex64)).abs().sum().backward()
    parts = [torch.view_as_real(p.grad).double().square().sum() for p in model.parameters()]
    torch.testing.assert_close(state.grad_norm(), torch.stack(parts).sum().sqrt())
    # DDP's part in C++ would end the group under Python's lock, for which gloo's threads may wait.
    del ddp
    gc.collect()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", ["fastcoll", "gloo"])
def test_complex_gradients(world, name):
    world(2).run(complex_gradients, name)
